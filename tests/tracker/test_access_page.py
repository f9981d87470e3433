"""The page of swarm health asks for a token where access control is on."""

from __future__ import annotations

from pathlib import Path

import pytest
from access_rig import access_site, ask
from aiohttp import web
from browser import CHROMIUM, browser

from tracker.http.app import make_app


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian package chromium)")
async def test_the_page_watches_with_a_token(tmp_path: Path) -> None:
    async with access_site(tmp_path) as site:
        agent = await site.join("h1")
        session = await agent.session()
        ops = await site.stranger(site.token("ops"))
        await ask(ops, "PUT", "/v1/preseeds/job-1", {"package": "team-a/x:v1", "count": 1})
        # Without TLS, which the browser would not trust; rights are the same.
        runner = web.AppRunner(make_app(site.service, site.preseeds), shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with browser(f"http://127.0.0.1:{runner.addresses[0][1]}/") as page:
                for token, answer in (
                    ("", "asks for a token"),
                    (site.token("reader"), "does not take"),
                    (site.token("ops"), "live"),
                ):
                    if token:
                        await page.evaluate(
                            f"document.querySelector('#token input').value = '{token}',"
                            "document.querySelector('#token button').click()"
                        )
                    await page.until(f"document.querySelector('#connection').innerText.includes('{answer}')")
                await page.until("swarmHealth.hosts.size === 1")
                await page.until("document.body.innerText.includes('job-1 (token:')")
                refusals = [complaint for complaint in page.complaints if " 401 " in complaint or " 403 " in complaint]
                assert page.complaints == refusals
        finally:
            await runner.cleanup()
        assert not session.socket.closed
