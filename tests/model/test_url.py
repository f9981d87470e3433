"""Addresses of trackers, what is shown of a URL, and what may be a secret in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.errors import UsageError
from p2pdist.model.url import redacted, secrets_in, tracker_urls


@pytest.mark.parametrize(
    ("url", "shown", "secrets"),
    [
        ("http://deploy:S3cr3t@h:9/pk?sig=TOKEN", "http://h:9/pk", ["deploy:S3cr3t", "sig=TOKEN"]),
        ("http://u:pa/ss@h/p", "http://h/p", ["u:pa/ss"]),
        ("http://u:p#w@h:8/a", "http://h:8/a", ["u:p#w"]),
        ("http://u:p@[::1]:9/?a#b", "http://[::1]:9", ["u:p", "a"]),
        ("http://u:80@80/x", "http://80/x", ["u:80"]),
        ("http://u@h/", "http://h", []),
        ("https://user:1234/SECRET@h/x", "https://h/x", ["user:1234/SECRET"]),
        ("https://user:1/2/3@h:9/x@y?q", "https://y", ["user:1/2/3@h:9/x", "q"]),
        ("https://h:1234/x?a@b", "https://h:1234/x", ["a@b"]),
        ("https://[::1]:80/x@y", "https://[::1]:80/x@y", []),
        ("https://h/x@y", "https://h/x@y", []),
        ("s3://bucket/pre@fix", "s3://bucket/pre@fix", []),
        ("file:///", "file:///", []),
        ("file:///srv/a@b", "file:///srv/a@b", []),
        ("u:p@h/x", "h/x", []),
        ("postgresql://u:p@h/db?sslmode=require", "postgresql://h/db", ["u:p"]),
        ("postgresql://u@h/db?sslmode=require", "postgresql://h/db", []),
        ("postgresql://h/db?password=x", "postgresql://h/db", ["password=x"]),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str, secrets: list[str]) -> None:
    assert redacted(url) == shown
    assert secrets_in(url) == secrets


WORDS = st.text("ab12:/?#[]%.", min_size=1, max_size=8)


@given(WORDS, st.sampled_from(["h", "h:9", "[::1]:9", "10.0.0.1"]), st.sampled_from(["", "/p", "/p?x=SECRET#f"]))
def test_no_password_is_shown_whatever_is_in_it(password: str, host: str, rest: str) -> None:
    url = f"http://u:{password}SECRET@{host}{rest}"
    assert "SECRET" not in redacted(url)
    assert "SECRET" in "".join(secrets_in(url))


@pytest.mark.parametrize(
    "url",
    (
        *("foo", "tracker:7070", "http://", "ftp://t", "http://t:99999", "http://t:0", "http://t:x", "http://[::1"),
        *("http://a b", "http://a..b", "http://" + "a" * 64, "http://t\x07"),
    ),
)
def test_what_is_no_address_of_a_tracker(url: str) -> None:
    """Beside others that are."""
    with pytest.raises(UsageError, match="no address of a tracker"):
        tracker_urls(["http://tracker:7070", url])


def test_addresses_of_trackers() -> None:
    given = [" http://tracker:7070/ ", "", "https://[::1]:7070", "http://a.example.com.", "http://10.0.0.1:1/prefix"]
    assert tracker_urls(given) == [
        *("http://tracker:7070", "https://[::1]:7070", "http://a.example.com.", "http://10.0.0.1:1/prefix")
    ]
    given = ["http://[fe80::1%eth0.100]:7070", "http://[fe80::1%br-lan]:7070", "HTTP://tracker"]
    assert tracker_urls(given) == given
