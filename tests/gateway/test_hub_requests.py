"""What the door makes of the paths that clients ask for."""

from __future__ import annotations

import pytest

from p2pdist.gateway.huggingface.names import HubRequest, parse_request
from p2pdist.model.errors import NotFound, UsageError
from p2pdist.model.hub import hub_name

MODEL, SHORT, DATA = hub_name("models", "org/name"), hub_name("models", "gpt2"), hub_name("datasets", "org/name")


@pytest.mark.parametrize(
    "path, asked",
    [
        ("/api/models/org/name", HubRequest("info", MODEL)),
        ("/api/models/gpt2", HubRequest("info", SHORT)),
        ("/api/models/gpt2/revision/refs%2Fpr%2F1", HubRequest("info", SHORT, "refs/pr/1")),
        ("/api/models/org/name/tree/main", HubRequest("tree", MODEL)),
        ("/api/datasets/org/name/tree/v1/a%20b/c", HubRequest("tree", DATA, "v1", "a b/c")),
        ("/api/datasets/org/name/paths-info/main", HubRequest("paths-info", DATA)),
        ("/api/models/gpt2/refs", HubRequest("refs", SHORT)),
        ("/api/models/org/name/auth-check", HubRequest("auth-check", MODEL)),
        ("/org/name/resolve/main/a/b.json", HubRequest("file", MODEL, "main", "a/b.json")),
        ("/org/name/raw/main/a/b.json", HubRequest("raw", MODEL, "main", "a/b.json")),
        ("/gpt2/raw/main/resolve/main", HubRequest("raw", SHORT, "main", "resolve/main")),
        ("/gpt2/resolve/main/resolve/main", HubRequest("file", SHORT, "main", "resolve/main")),
        ("/datasets/org/name/resolve/main/d.parquet", HubRequest("file", DATA, "main", "d.parquet")),
    ],
)
def test_a_path_says_what_is_asked_for(path: str, asked: HubRequest) -> None:
    assert parse_request(path) == asked


@pytest.mark.parametrize(
    "path",
    [
        "/org/name/resolve/main/../../etc/passwd",
        "/org/name/resolve/main/a%2F..%2Fb",
        "/org/name/resolve/main/%2e%2e/b",
        "/org/name/resolve/main/a%0Ab",
        "/org/name/resolve/main/a%5Cb",
        "/org/name/resolve/ma..in/a",
        "/org/name/resolve/main/%FF",
        "/org/na%2Fme/resolve/main/a",
        "/org/.name/resolve/main/a",
        "/org/name/resolve/main/" + "a" * 300,
        "/" + "a/" * 5000,
    ],
)
def test_names_that_nothing_can_have_are_refused(path: str) -> None:
    with pytest.raises(UsageError):
        parse_request(path)


@pytest.mark.parametrize(
    "path", ["/", "/api/whoami-v2", "/api/models", "/api/others/a/b", "/org/name/blob/main/a", "/a/b/c/resolve/main/x"]
)
def test_what_is_not_served_is_said(path: str) -> None:
    with pytest.raises(NotFound):
        parse_request(path)
