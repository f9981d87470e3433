"""The units of deploy/systemd under a systemd of their own: they start, mount where the host sees
it, and stop cleanly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from systemd_rig import missing, run_units

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
SCRIPT = """
export PATH=/opt/p2pdist/bin:$PATH
ready() {
    for _ in $(seq 60); do
        p2pdist status --json 2>/dev/null | grep -q '"connected": *true' && return
        sleep 0.5
    done
}
# What an operator does: copies the join token to the host.
until [ -s /var/lib/p2pdist-tracker/access/join-default.token ]; do sleep 0.2; done
install -m 0640 -g p2pdist /var/lib/p2pdist-tracker/access/join-default.token /etc/p2pdist/join
systemctl restart p2pdist-agent
ready
mkdir /tmp/app
echo 'print("it ran")' > /tmp/app/a.py
for kind in tree squashfs; do
    p2pdist pack /tmp/app -t "demo/$kind:v1" --format $kind --layout /tmp/layout --entrypoint '["python3", "${P2PDIST_ROOT}/a.py"]'
    p2pdist push "demo/$kind:v1" --layout /tmp/layout --origin file:///srv/origin
    chmod -R a+rX /srv/origin
    p2pdist pull "demo/$kind:v1"
    p2pdist run "demo/$kind:v1" && echo "$kind: ran"
    p2pdist mount "demo/$kind:v1" "/srv/$kind" && grep -q " /srv/$kind " /proc/mounts && echo "$kind: seen"
done
systemctl reload p2pdist-agent
ps -o user= -C p2pdist | sort -u | tr '\\n' ' ' | sed 's/^/users: /; s/$/\\n/'
systemctl stop p2pdist-agent
grep -cE ' /srv/(tree|squashfs) ' /proc/mounts | sed 's/^/left: /'
systemctl start p2pdist-agent
ready
for kind in tree squashfs; do python3 "/srv/$kind/a.py"; p2pdist umount "/srv/$kind" && echo "$kind: taken over"; done
systemctl stop p2pdist-agent p2pdist-tracker
for unit in p2pdist-agent p2pdist-tracker; do
    echo "$unit: $(systemctl show -p Result -p ExecMainStatus -p NRestarts $unit | sort | tr '\\n' ' ')"
done
# What they said last, to show why they failed.
systemctl status --no-pager --lines=15 p2pdist-agent p2pdist-tracker | sed 's/^/  /'
"""
CLEAN = "ExecMainStatus=0 NRestarts=0 Result=success "

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(280),
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can run"),
]


def files(*, mounts: bool) -> dict[str, str]:
    found = {f"etc/systemd/system/{path.name}": path.read_text() for path in UNITS.glob("*.service")}
    if not mounts:
        found["etc/systemd/system/p2pdist-agent.service.d/no-mounts.conf"] = (UNITS / "no-mounts.conf").read_text()
    found["etc/sysusers.d/p2pdist.conf"] = (UNITS / "p2pdist.sysusers.conf").read_text()
    found["etc/p2pdist/tracker.env"] = "P2PDIST_TRACKER_ORIGIN=file:///srv/origin\n"
    found["etc/p2pdist/agent.env"] = (
        "P2PDIST_AGENT_TRACKER=https://127.0.0.1:7070\nP2PDIST_AGENT_LISTEN=127.0.0.1:7071\n"
        "P2PDIST_AGENT_JOIN_FILE=/etc/p2pdist/join\n"
    )
    return found


def answers(said: str) -> dict[str, str]:
    """What the script found out: the lines of its own."""
    return dict(re.findall(r"^([\w-]+): (.*)$", said, re.MULTILINE))


def test_the_host_sees_what_an_agent_mounts() -> None:
    """Trees and images; they stay while the agent is stopped, and the next one takes them over.
    Nothing had to be started twice."""
    said = run_units(files(mounts=True), SCRIPT)
    found = answers(said)
    assert said.count("it ran") == 4 and "erofs: root" in said and "squashfs: root" in said, said
    assert found["left"] == "2", said
    assert [found[kind] for kind in ("tree", "squashfs")] == ["taken over"] * 2, said
    assert [said.count(f"{kind}: seen") for kind in ("tree", "squashfs")] == [1, 1], said
    assert {found["p2pdist-agent"], found["p2pdist-tracker"]} == {CLEAN}, json.dumps(found)


def test_an_agent_that_mounts_nothing_runs_with_no_rights() -> None:
    """Programs run all the same: from files in the store, and in a user namespace of their own."""
    said = run_units(files(mounts=False), SCRIPT)
    found = answers(said)
    assert said.count("it ran") == 2 and ": seen" not in said, said
    assert "root" not in found["users"].split(), said
    assert {found["p2pdist-agent"], found["p2pdist-tracker"]} == {CLEAN}, json.dumps(found)
