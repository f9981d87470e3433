"""What the path of a request to a registry names, in each client's shape, and what it does not."""

from __future__ import annotations

import pytest

from p2pdist.gateway.registry.failures import RegistryFailure
from p2pdist.gateway.registry.names import PATH_CHARACTERS_MAX, parse_request

DIGEST = "sha256:" + "ab" * 32
UPSTREAMS = ("docker.io", "hub", "127.0.0.1:5000")


@pytest.mark.parametrize(
    ("path", "namespaces", "kind", "name", "target"),
    [
        # containerd: the repository in the path, the upstream as ns
        ("/v2/team/app/manifests/v1", ["127.0.0.1:5000"], "manifest", "127.0.0.1:5000/team/app", "v1"),
        (f"/v2/team/app/blobs/{DIGEST}", ["Registry.Example"], "blob", "registry.example/team/app", DIGEST),
        ("/v2/library/nginx/manifests/1.27", ["docker.io"], "manifest", "docker.io/library/nginx", "1.27"),
        ("/v2/docker.io/app/manifests/v1", ["up.example"], "manifest", "up.example/docker.io/app", "v1"),
        # containers/image: the upstream first in the path
        ("/v2/127.0.0.1:5000/team/app/manifests/v1", [], "manifest", "127.0.0.1:5000/team/app", "v1"),
        ("/v2/127.0.0.1%3A5000/team/app/manifests/v1", [], "manifest", "127.0.0.1:5000/team/app", "v1"),
        ("/v2/127.0.0.1__5000/team/app/manifests/v1", [], "manifest", "127.0.0.1:5000/team/app", "v1"),
        ("/v2/localhost__5000/app/manifests/v1", [], "manifest", "localhost:5000/app", "v1"),
        ("/v2/team/a__5000/manifests/v1", [], "manifest", "docker.io/team/a__5000", "v1"),
        ("/v2/quay.io/a/b/c/tags/list", [], "tags", "quay.io/a/b/c", ""),
        ("/v2/localhost/app/manifests/v1", [], "manifest", "localhost/app", "v1"),
        ("/v2/hub/app/manifests/v1", [], "manifest", "hub/app", "v1"),
        # the Docker daemon: neither
        ("/v2/library/nginx/manifests/latest", [], "manifest", "docker.io/library/nginx", "latest"),
        ("/v2/nginx/manifests/latest", [], "manifest", "docker.io/library/nginx", "latest"),
        ("/v2/docker.io/nginx/manifests/latest", [], "manifest", "docker.io/library/nginx", "latest"),
        ("/v2/registry-1.docker.io/a/b/tags/list", [], "tags", "docker.io/a/b", ""),
        # names that look like parts of the interface
        ("/v2/team/manifests/manifests/v1", ["up.example"], "manifest", "up.example/team/manifests", "v1"),
        ("/v2/tags/tags/list", ["up.example"], "tags", "up.example/tags", ""),
        (f"/v2/a/blobs/referrers/{DIGEST}", ["up.example"], "referrers", "up.example/a/blobs", DIGEST),
        ("/v2/up.example/manifests/v1", [], "manifest", "docker.io/library/up.example", "v1"),
    ],
)
def test_a_request_is_read(path: str, namespaces: list[str], kind: str, name: str, target: str) -> None:
    asked = parse_request(path, namespaces, UPSTREAMS)
    assert (asked.kind, str(asked.name), asked.target) == (kind, name, target)


@pytest.mark.parametrize(
    ("path", "namespaces", "status", "code"),
    [
        ("/v2/../v1/status", [], 404, "UNSUPPORTED"),
        ("/v2/a/../../manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/a/%2e%2e/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/a/%252e%252e/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/a%2Fb/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/a%5Cb/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/a%00b/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/a%0D%0Ab/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/a//b/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2//manifests/v1", ["up.example"], 404, "UNSUPPORTED"),
        ("/v2/Team/app/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/\u00e4/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/%ff/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        (f"/v2/{'a' * 256}/manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        (f"/v2/{'a/' * PATH_CHARACTERS_MAX}manifests/v1", ["up.example"], 400, "NAME_INVALID"),
        ("/v2/app/manifests/v1", ["up.example", "other.example"], 400, "NAME_INVALID"),
        ("/v2/app/manifests/v1", [""], 400, "NAME_INVALID"),
        ("/v2/app/manifests/v1", ["user@up.example"], 400, "NAME_INVALID"),
        ("/v2/app/manifests/v1", ["up.example/other"], 400, "NAME_INVALID"),
        ("/v2/app/manifests/v1", ["up.example\r\nX: y"], 400, "NAME_INVALID"),
        ("/v2/app/blobs/sha256:abc", ["up.example"], 400, "DIGEST_INVALID"),
        (f"/v2/app/blobs/{DIGEST.upper()}", ["up.example"], 400, "DIGEST_INVALID"),
        ("/v2/app/blobs/sha512:" + "ab" * 64, ["up.example"], 400, "DIGEST_INVALID"),
        ("/v2/app/referrers/v1", ["up.example"], 400, "DIGEST_INVALID"),
        ("/v2/app/manifests/sha256:abc", ["up.example"], 400, "DIGEST_INVALID"),
        ("/v2/app/manifests/.v1", ["up.example"], 404, "MANIFEST_UNKNOWN"),
        (f"/v2/app/manifests/{'v' * 129}", ["up.example"], 404, "MANIFEST_UNKNOWN"),
        ("/v2/app/manifests/", ["up.example"], 404, "MANIFEST_UNKNOWN"),
        ("/v2/_catalog", [], 404, "UNSUPPORTED"),
        ("/v2/app/tags/other", ["up.example"], 404, "UNSUPPORTED"),
        ("/v2/manifests/v1", ["up.example"], 404, "UNSUPPORTED"),
        ("/v2/app/blobs/uploads/", ["up.example"], 404, "UNSUPPORTED"),
    ],
)
def test_what_names_nothing_is_refused(path: str, namespaces: list[str], status: int, code: str) -> None:
    with pytest.raises(RegistryFailure) as failed:
        parse_request(path, namespaces, UPSTREAMS)
    assert (failed.value.status, failed.value.code) == (status, code)
