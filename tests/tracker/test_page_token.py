"""The page of a tracker with access control, in a real browser: it asks for a token once."""

from __future__ import annotations

from pathlib import Path

import pytest
from access_rig import access_site
from browser import CHROMIUM, Page, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian package chromium)")

ASKED = "!document.querySelector('#credential').hidden"
LIVE = "document.querySelector('#connection').innerText === 'live'"


async def give(page: Page, token: str) -> None:
    await page.evaluate(
        f"(() => {{ const form = document.querySelector('#credential'); form.querySelector('input').value = {token!r};"
        " form.requestSubmit(); })()"
    )


@pytest.mark.slow
async def test_the_page_asks_for_a_token_and_keeps_it_for_the_tab(tmp_path: Path) -> None:
    async with access_site(tmp_path) as site:
        token = site.token("ops")
        async with browser(site.url + "/", "--ignore-certificate-errors") as page:
            await page.until(ASKED)
            assert "p2pdist token create" in await page.evaluate("document.querySelector('#credential').innerText")
            await give(page, "nonsense")
            await page.until(ASKED)
            await give(page, token)
            await page.until(f"!({ASKED}) && {LIVE}")
            await page.evaluate("location.reload()")
            await page.until(f"document.readyState === 'complete' && {LIVE}")
            assert await page.evaluate("document.cookie + localStorage.length + location.href") == f"0{site.url}/"
            assert not any(token in url for url in page.requested)


@pytest.mark.slow
async def test_a_token_without_the_right_to_watch_is_told_so(tmp_path: Path) -> None:
    async with access_site(tmp_path) as site, browser(site.url + "/", "--ignore-certificate-errors") as page:
        await page.until(ASKED)
        await give(page, site.token("slurm"))
        await page.until(
            "/watch/.test(document.querySelector('header').innerText + document.querySelector('#credential').innerText)"
        )
