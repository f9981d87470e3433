"""Where lazy views can be tried with events of the kernel."""

from __future__ import annotations

import os

import pytest

from p2pdist.mount.supervisor import fanotify


def events_work() -> bool:
    if os.geteuid() != 0:
        return False
    try:
        os.close(fanotify.open_group())
    except OSError:
        return False
    return True


needs_events = pytest.mark.skipif(not events_work(), reason="lazy views need root and Linux 6.14")
