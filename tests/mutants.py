"""Break the code on purpose and see that the tests notice: `make mutants`.

Each mutant is one small change to the source. It is made in a temporary copy of the tree, the tests
named with it run there, and at least one of them must fail; the same tests pass in an unchanged
copy first, or their failure would prove nothing. To add one, add a line to MUTANTS. A mutant whose
old text is not found exactly once fails the run: the code has moved on, so must the table.

    python tests/mutants.py [--list] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300
FAILED = 1
"""The exit code of pytest for "tests ran and some failed"; anything higher means that they could
not run."""


@dataclass(frozen=True)
class Mutant:
    """Replace `old` by `new`, once, in `file`; then one of `tests` (arguments of pytest) fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "keep no inodes free",
        "p2pdist/store/store.py",
        "max(0, files + len(self._stock.objects.expected) - left)",
        "0",
        ("tests/store/test_store_disk.py",),
    ),
    Mutant(
        "never miss the store",
        "p2pdist/store/disk.py",
        "            self.lost = not _is_at(self._path, self._fd)\n",
        "            self.lost = False\n",
        ("tests/system/test_edges.py::test_an_agent_whose_store_was_removed_is_not_ready",),
    ),
    Mutant(
        "count whole messages as life",
        "p2pdist/agent/tracker/connection.py",
        "and self._bytes_received() > received:",
        "and self._bytes_received() < received:",
        ("tests/agent/test_session.py::test_a_tracker_whose_message_takes_long_is_kept",),
    ),
    Mutant(
        "take one that lives for one that hangs",
        "p2pdist/client/pulse.py",
        "if not await self._lives(url) and not _answered(task):",
        "if await self._lives(url) and not _answered(task):",
        ("tests/cli/test_wrong_tracker.py::test_of_several_trackers_one_that_is_late_and_lives_is_waited_for",),
    ),
    Mutant(
        "do not return memory",
        "p2pdist/cli/verbs/tracker.py",
        "    give_memory_back()\n",
        "",
        ("tests/cli/test_returned_memory.py",),
    ),
    Mutant(
        "give children what was decrypted",
        "p2pdist/agent/pull/registry.py",
        "        return digest in self.served and digest not in self._store.opened\n",
        "        return digest in self.served\n",
        ("tests/agent/test_sealed_attacks.py",),
    ),
    Mutant(
        "compare no name over TLS",
        "p2pdist/transfer/openssl/client.py",
        "    if not compared:\n        return\n",
        "    return\n",
        ("tests/transfer/test_openssl_client.py",),
    ),
    Mutant(
        "verify no certificate over TLS",
        "p2pdist/transfer/openssl/contexts.py",
        "context.set_verify(SSL.VERIFY_PEER | (0 if strangers else SSL.VERIFY_FAIL_IF_NO_PEER_CERT))",
        "context.set_verify(SSL.VERIFY_NONE)",
        ("tests/transfer/test_openssl_client.py",),
    ),
    Mutant(
        "leave records that came together with others unread",
        "p2pdist/transfer/openssl/server.py",
        "return int(lib.SSL_pending(self._ssl)) + _waiting(self._encrypted_in, self._start)",
        "return int(lib.SSL_pending(self._ssl))",
        ("tests/transfer/test_openssl_server.py",),
    ),
    Mutant(
        "serve before the handshake is over",
        "p2pdist/transfer/openssl/server.py",
        "        if not self._verified:\n",
        "        if self._verified is None:\n",
        ("tests/transfer/test_openssl_server.py",),
    ),
    Mutant(
        "read over TLS before the peer is verified",
        "p2pdist/transfer/openssl/client.py",
        "        if not self._verified:\n",
        "        if self._verified is None:\n",
        ("tests/transfer/test_openssl_client.py",),
    ),
    Mutant(
        "keep the hosts of every plan",
        "tracker/core/member.py",
        "if earlier.count(FROM_ORIGIN) == TOLD_MAX - 1:",
        "if earlier.count(FROM_ORIGIN) == TOLD_MAX * 9:",
        ("tests/tracker/test_member_memory.py",),
    ),
    Mutant(
        "put a key in front of the others",
        "tracker/core/host.py",
        "    more = (*keys, key)\n",
        "    more = (key, *keys)\n",
        ("tests/tracker/test_member_memory.py",),
    ),
    Mutant(
        "serve what was decrypted from the next start on",
        "p2pdist/agent/pull/registry.py",
        "            if blob.complete and blob.digest not in self._store.opened:\n                self._serve",
        "            if blob.complete:\n                self._serve",
        ("tests/agent/test_sealed_packages.py",),
    ),
    Mutant(
        "forget to mark what is decrypted",
        "p2pdist/store/store.py",
        "                store.opened.record({digest: encrypted})\n",
        "",
        ("tests/agent/test_sealed_packages.py",),
    ),
    Mutant(
        "open by one name what another one opened",
        "p2pdist/agent/sealed_packages.py",
        "named = records.was_given(opened, name) and ",
        "named = ",
        ("tests/agent/test_sealed_attacks.py",),
    ),
    Mutant(
        "ask for keys while no session has shown who the tracker is",
        "p2pdist/agent/sealed_packages.py",
        "    if not session.connected:\n        raise Unavailable",
        "    if False:\n        raise Unavailable",
        ("tests/agent/test_sealed_attacks.py",),
    ),
    Mutant(
        "give keys of packages that a host may not read",
        "tracker/http/content.py",
        "        digest = (await readable_package(request, reference)).digest\n        await policy_header",
        "        digest = (await access.packages._content.resolve(reference)).digest\n        await policy_header",
        ("tests/agent/test_sealed_packages.py",),
    ),
    Mutant(
        "let packages in the clear into a namespace of encrypted ones",
        "tracker/http/content.py",
        "    if not sealed and rules.requires_sealed(reference.name):\n",
        "    if False:\n",
        ("tests/agent/test_sealed_packages.py",),
    ),
    Mutant(
        "take the end of a cut blob for its end",
        "p2pdist/encryption.py",
        "_chunk_nonce(number, number == self._count - 1)",
        "_chunk_nonce(number, False)",
        ("tests/test_sealing.py",),
    ),
    Mutant(
        "encrypt what a disk changed",
        "p2pdist/package/repository/sealed_push.py",
        "        if read.digest() != digest:\n",
        "        if False:\n",
        ("tests/package/test_sealed_push.py",),
    ),
    Mutant(
        "push what is wrapped anew over a newer package",
        "p2pdist/package/repository/push.py",
        "            if replaces is not None and (",
        "            if False and (",
        ("tests/package/test_sealed_push.py",),
    ),
    Mutant(
        "end a broadcast between two blobs",
        "tracker/core/history/broadcasts.py",
        "return not self.outstanding and now - self.changed_at >= QUIET_S",
        "return not self.outstanding",
        ("tests/tracker/test_history_core.py",),
    ),
    Mutant(
        "show watchers the history of every package",
        "tracker/http/history/routes.py",
        "    return bool(names) and identity.may_read(names)\n",
        "    return True\n",
        ("tests/tracker/test_history_http.py",),
    ),
    Mutant(
        "skip verification",
        "p2pdist/model/pieces.py",
        "        return len(data) == self.layout.length(piece) and (",
        "        return True or (",
        ("tests/model",),
    ),
    Mutant(
        "store without verifying",
        "p2pdist/store/blobs/blob.py",
        "            if not (digest if vouched is not None else self.pieces.verify(piece, data)):\n                return False\n",
        "",
        ("tests/store/test_store_blob.py",),
    ),
    Mutant(
        "lose what is held of a large file",
        "p2pdist/store/objects/btrfs.py",
        "            pwrite_all(self._fd, self._held, self._end - len(self._held))\n            self._held",
        "            self._held",
        ("tests/store/test_extents.py",),
    ),
    Mutant(
        "put fewer bytes before a block than lie before it in its sector",
        "p2pdist/store/objects/btrfs.py",
        "        if begin < self._done:\n",
        "        if False:\n",
        ("tests/store/test_extents.py",),
    ),
    Mutant(
        "read a temporary file before all of it is in the file",
        "p2pdist/store/trees/assembly.py",
        "        temporary.flush()\n",
        "",
        ("tests/store/test_extents.py",),
    ),
    Mutant(
        "import without verifying",
        "p2pdist/store/blobs/blob.py",
        "            if not self.pieces.verify(piece, data):\n                return False\n            self._put(piece)",
        "            self._put(piece)",
        ("tests/store/test_store_import.py",),
    ),
    Mutant(
        "allow a cycle",
        "tracker/core/planning/slot_index.py",
        "                if (not rack.fed or free > 0) and self.swarm.edges.rooted(self.stripe, host):",
        "                if not rack.fed or free > 0:",
        ("tests/tracker/test_planner.py",),
    ),
    Mutant(
        "lose a report",
        "tracker/core/fleet.py",
        "                self._counts.take(swarm, swarm.members[name], counts, advance.origin_bytes, judge=judge, now=now)\n",
        "                pass\n",
        ("tests/tracker/test_fleet.py",),
    ),
    Mutant(
        "call a host slow for what its readers come before",
        "tracker/core/monitor/progress.py",
        "    since = max(member.relieved_at, member.yielded_at)",
        "    since = member.relieved_at",
        ("tests/tracker/test_progress.py",),
    ),
    Mutant(
        "never find a slow parent of children that yield",
        "tracker/core/monitor/progress.py",
        "    return now - lag.since - max(0.0, member.yielded_at - lag.since) * (1 - 1 / YIELDS_TIMES)",
        "    return now - max(lag.since, member.yielded_at)",
        ("tests/tracker/test_progress.py",),
    ),
    Mutant(
        "believe for ever that a host yields",
        "tracker/core/member.py",
        "self.yielded_at = now if self.yielded_s < YIELDS_MAX_S else self.yielded_at",
        "self.yielded_at = now",
        ("tests/tracker/test_progress.py",),
    ),
    Mutant(
        "drop the last piece",
        "p2pdist/core/download/download.py",
        "    if not download.finished and download.have.complete and not download.vouched:",
        "    if not download.finished and len(download.have) >= download.have.count - 1 and not download.vouched:",
        ("tests/core/test_download.py",),
    ),
    Mutant(
        "end a stream one piece early",
        "p2pdist/core/uplink.py",
        "        elif stream.left == 0:",
        "        elif stream.left <= 1:",
        ("tests/core/test_uplink.py",),
    ),
    Mutant(
        "offer pieces before they verified",
        "p2pdist/core/uplink.py",
        "[piece for piece in range(stripe, layout.count, stripes) if piece in have]",
        "list(range(stripe, layout.count, stripes))",
        ("tests/core/test_uplink.py",),
    ),
    Mutant(
        "believe who sent wrong bytes",
        "p2pdist/core/sources.py",
        '        if record is not None and (record.reason != "corrupt" or source.is_origin):',
        "        if record is not None:",
        ("tests/core/test_sources.py",),
    ),
    Mutant(
        "let every rack-mate import",
        "tracker/core/planning/slot_index.py",
        "        return self._take(rack, child)",
        "        return None",
        ("tests/tracker/test_rack_trees.py",),
    ),
    Mutant(
        "never find a slow uplink",
        "tracker/core/monitor/progress.py",
        "LAG_S = 0.7",
        "LAG_S = 700.0",
        ("tests/tracker/test_progress.py",),
    ),
    Mutant(
        "believe the silent",
        "tracker/core/monitor/progress.py",
        "SILENT_MIN_S = 0.6",
        "SILENT_MIN_S = 600.0",
        ("tests/tracker/test_progress.py",),
    ),
    Mutant(
        "a sluggish child takes turns",
        "p2pdist/core/uplink.py",
        "SLUGGISH_TIMES = 5",
        "SLUGGISH_TIMES = 5e9",
        ("tests/core/test_uplink.py",),
    ),
    Mutant(
        "ignore the cap on leases",
        "tracker/core/origin/leases.py",
        "left = self._max + beyond - self._total",
        "left = swarm.stripes",
        ("tests/tracker/test_fleet.py",),
    ),
    Mutant(
        "let preseeds have all leases",
        "tracker/core/origin/leases.py",
        "max(1, leases_max // 2)",
        "leases_max",
        ("tests/tracker/test_swarm_priorities.py",),
    ),
    Mutant(
        "call preseeds slow that give way",
        "tracker/core/repair/reputation.py",
        "RECOVERY_S = 3.0",
        "RECOVERY_S = -3.0",
        ("tests/tracker/test_swarm_priorities.py",),
    ),
    Mutant(
        "let preseeds have half of the uplink",
        "p2pdist/core/fair_queue.py",
        "PRESEED_SHARE = 1 / 16",
        "PRESEED_SHARE = 1 / 2",
        ("tests/core/test_fair_queue.py",),
    ),
    Mutant(
        "never give way on the downlink",
        "p2pdist/core/downlink.py",
        "        return LOOK_AGAIN_S",
        "        return 0.0",
        ("tests/core/test_downlink.py",),
    ),
    Mutant(
        "leave a preseed that is waited for as it is",
        "p2pdist/agent/pull/streams.py",
        '        self.priority = "start"',
        '        self.priority = "preseed"',
        ("tests/agent/test_priorities.py",),
    ),
    Mutant(
        "grant leases while roots may come back",
        "tracker/core/fleet.py",
        "free = free * knows + (",
        "free = free + (",
        ("tests/tracker/test_fleet.py",),
    ),
    Mutant(
        "let superpeers read the origin though a tracker answers",
        "p2pdist/core/sources.py",
        "*self._superpeers) if alone else tracker",
        "*self._superpeers)",
        ("tests/core/test_candidates.py",),
    ),
    Mutant(
        "let everybody read the origin without a tracker",
        "p2pdist/core/sources.py",
        "ORIGIN if name == self.host else by_name[name]",
        "ORIGIN",
        ("tests/core/test_candidates.py",),
    ),
    Mutant(
        "never ask the same superpeer as the others",
        "p2pdist/core/sources.py",
        "ranked(self._key, by_name, len(by_name))",
        "ranked(self.host.encode(), by_name, len(by_name))",
        ("tests/core/test_candidates.py",),
    ),
    Mutant(
        "tell of the superpeers in every plan",
        "tracker/core/planning/assignments.py",
        "if sites[member.site] != member.superpeers else ()",
        "if sites[member.site] else ()",
        ("tests/tracker/test_origin_superpeers.py",),
    ),
    Mutant(
        "read on where somebody has the whole",
        "tracker/core/repair/remedies.py",
        "_is_whole(swarm, stripe) or ",
        "",
        ("tests/tracker/test_origin_superpeers.py",),
    ),
    Mutant(
        "doubt a large fleet after two silent hosts",
        "tracker/core/repair/claims.py",
        "max(DOUBTS_MAX, believed)",
        "DOUBTS_MAX",
        ("tests/tracker/test_claims.py",),
    ),
    Mutant(
        "doubt on the word of a host that is cut off",
        "tracker/core/repair/claims.py",
        "return not others or any(",
        "return True or any(",
        ("tests/tracker/test_claims.py",),
    ),
    Mutant(
        "ban on the word of hosts that are cut off",
        "tracker/core/complaints.py",
        'if reason != "corrupt" and _cut_off(',
        "if False and _cut_off(",
        ("tests/tracker/test_complaint_votes.py",),
    ),
    Mutant(
        "judge early complaints at once",
        "tracker/core/repair/unheard_complaints.py",
        "not source.hearsay and child.heard_at > early.at",
        "not source.hearsay",
        ("tests/tracker/test_unheard.py",),
    ),
    Mutant(
        "tell all hosts at once",
        "tracker/core/planning/assignments.py",
        "SLICE = 256",
        "SLICE = 256000",
        ("tests/tracker/test_member_memory.py",),
    ),
    Mutant(
        "let the last import grow slowly",
        "tracker/core/monitor/progress.py",
        "< GOOD_SHARE * rate\n",
        "< 0 * rate\n",
        ("tests/tracker/test_sites.py",),
    ),
    Mutant(
        "let a trusted host read beside another",
        "tracker/core/repair/claims.py",
        "and _reads_beside(swarm, stripe, member):",
        "and False:",
        ("tests/tracker/test_claims.py",),
    ),
    Mutant(
        "believe two hosts about the origin",
        "tracker/core/repair/origin_failures.py",
        "if believed and (not seeing or _all_say_so(swarm)):",
        "if believed:",
        ("tests/tracker/test_origin_failures.py",),
    ),
    Mutant(
        "narrow trees for small blobs",
        "tracker/core/repair/reputation.py",
        "        slots = fanout(len(swarm.members), swarm.layout, self.capacities.typical())",
        "        slots = 1",
        ("tests/tracker/test_fanout.py",),
    ),
    Mutant(
        "allot the slots of one stripe only where they lack",
        "tracker/core/repair/reputation.py",
        "            member.allot_all()",
        "            member.allotted = (min(member.allotted[0], member.slots),)",
        ("tests/tracker/test_fanout.py",),
    ),
    Mutant(
        "small blobs wait for a tick",
        "tracker/core/planning/schedule.py",
        "            self.wake_at = min(due, self.wake_at)",
        "            pass",
        ("tests/tracker/test_sessions.py", "tests/tracker/test_schedule.py"),
    ),
    Mutant(
        "keep a connection whose stream did not end",
        "p2pdist/transfer/stream/protocol.py",
        'self._reusable and closed.reason == "done"',
        "self._reusable",
        ("tests/transfer/test_connection_pool.py",),
    ),
    Mutant(
        "close a stream before its end",
        "p2pdist/transfer/stream/protocol.py",
        '    ("receiving", "all stored"): "end due",',
        '    ("receiving", "all stored"): "receiving",',
        ("tests/transfer/test_connection_pool.py",),
    ),
    Mutant(
        "let the loop wait for the disk",
        "p2pdist/transfer/stream/loop_receiver.py",
        "        if self._pause_s or self.share.high:",
        "        if self._pause_s:",
        ("tests/transfer/test_stream_loop_receiver.py",),
    ),
    Mutant(
        "trust a kept connection",
        "p2pdist/transfer/stream/client.py",
        "            except (EndOfConnection, OSError) as gone:",
        "            except ZeroDivisionError as gone:",
        ("tests/transfer/test_connection_pool.py",),
    ),
    Mutant(
        "reports before joins",
        "p2pdist/agent/tracker/connection.py",
        "                if blob in self._advances or len(self._holdings) >= BLOBS_PER_MESSAGE_MAX:",
        "                if len(self._holdings) >= BLOBS_PER_MESSAGE_MAX:",
        ("tests/agent/test_outbox.py",),
    ),
    Mutant(
        "believe a blob of one piece",
        "p2pdist/store/blobs/recovery.py",
        "            trusted = complete and entry.complete and (entry.durable or entry.boot == str(context.boot))",
        "            trusted = entry.durable or entry.boot in (str(context.boot), '')",
        ("tests/store/test_store_crash.py",),
    ),
    Mutant(
        "let one address have all connections",
        "p2pdist/transfer/connections.py",
        "int(total_max * ADDRESS_SHARE)",
        "total_max",
        ("tests/transfer/test_connections.py",),
    ),
    Mutant(
        "close the connection that was used last",
        "p2pdist/transfer/connections.py",
        "descriptor = next(iter(idle))",
        "descriptor = next(reversed(idle))",
        ("tests/transfer/test_connections.py",),
    ),
    Mutant(
        "close connections in use",
        "p2pdist/transfer/connections.py",
        "        if entry is not None:\n            self._drop_idle(entry[0], descriptor)\n        try:",
        "        try:",
        ("tests/transfer/test_connections.py",),
    ),
    Mutant(
        "close connections of the quietest address",
        "p2pdist/transfer/connections.py",
        "max(self._idle, key",
        "min(self._idle, key",
        ("tests/transfer/test_connections.py",),
    ),
    Mutant(
        "count closed connections",
        "p2pdist/transfer/connections.py",
        "            self._sweep()\n",
        "            pass\n",
        ("tests/transfer/test_connections.py",),
    ),
    Mutant(
        "let half handshakes stay",
        "p2pdist/transfer/connections.py",
        "        elif self._serving is not None:\n            self._serving.cancel()",
        "        elif False:\n            self._serving.cancel()",
        ("tests/transfer/test_connections.py",),
    ),
    Mutant(
        "take connections without a limit",
        "p2pdist/transfer/connections.py",
        "if server is None or not self._book.take(host, accepted):",
        "if server is None:",
        ("tests/transfer/test_connections.py",),
    ),
    Mutant(
        "count sessions as connections",
        "tracker/http/sessions.py",
        "    release(request)\n",
        "",
        ("tests/tracker/test_tracker_connections.py",),
    ),
    Mutant(
        "close the health page's connection",
        "tracker/http/pages.py",
        "        with in_use(request):",
        "        if True:",
        ("tests/tracker/test_tracker_connections.py",),
    ),
    Mutant(
        "call a lost peer one that sent all",
        "p2pdist/transfer/stream/client.py",
        "            if error.errno is not None:",
        "            if False:",
        ("tests/transfer/test_stream_faults.py",),
    ),
    Mutant(
        "let a source keep pieces from others",
        "p2pdist/transfer/stream/protocol.py",
        "return piece if piece is not None and self._lacks(piece) else None",
        "return piece",
        ("tests/transfer/test_stream_faults.py",),
    ),
    Mutant(
        "take tickets for every host",
        "p2pdist/model/access.py",
        "    if not by_join and not by_name:",
        '    if ticket.receiver != "*" and not by_join and not by_name:',
        ("tests/model/test_access.py",),
    ),
    Mutant(
        "pay no shared limit",
        "p2pdist/core/fair_queue.py",
        "            flow.limit.pay(flow.block, now)\n",
        "            pass\n",
        ("tests/core/test_shared_limits.py",),
    ),
    Mutant(
        "measure the uplink while a shared limit holds",
        "p2pdist/core/fair_queue.py",
        "(self.starts_waiting and self._start.ready(now))",
        "self.starts_waiting",
        ("tests/core/test_shared_limits.py",),
    ),
    Mutant(
        "receive faster than a shared limit",
        "p2pdist/core/downlink.py",
        "        return max(pause_s, self.tokens.free_at - now)",
        "        return pause_s",
        ("tests/core/test_shared_limits.py",),
    ),
    Mutant(
        "let hosts with many leases read no more",
        "tracker/core/origin/leases.py",
        "limit_bytes_s * leases / held.total()",
        "limit_bytes_s / len(held)",
        ("tests/tracker/test_origin_limit.py",),
    ),
    Mutant(
        "tell shares of the origin again and again",
        "tracker/core/origin/leases.py",
        " and host.origin_limit_bytes_s != share",
        "",
        ("tests/tracker/test_origin_limit.py",),
    ),
    Mutant(
        "stay with a silent source",
        "p2pdist/core/download/stripe.py",
        "        if receiving.silent_s(event, now=now) < limit_s:",
        "        if True:",
        ("tests/system/test_strangers.py::test_silent_seeds_do_not_hold_up_a_pull",),
    ),
    Mutant(
        "ask a silent address under each of its names",
        "p2pdist/core/sources.py",
        '        self._silent[source.address] = _Record(failures, until, "stalled")\n',
        "        self._silent.pop(source.address, None)\n",
        ("tests/system/test_strangers.py::test_silent_seeds_do_not_hold_up_a_pull",),
    ),
    Mutant(
        "let one address have all stream slots",
        "p2pdist/core/stream_slots.py",
        "ADDRESS_SHARE = 3 / 4",
        "ADDRESS_SHARE = 1",
        ("tests/system/test_strangers.py::test_unread_streams_leave_slots_for_children",),
    ),
    Mutant(
        "let unread streams keep their slots",
        "p2pdist/core/stream_slots.py",
        "        if not stuck:\n",
        "        if True:\n",
        ("tests/system/test_strangers.py::test_unread_streams_leave_slots_for_children",),
    ),
    Mutant(
        "evict for readers what users pulled",
        "p2pdist/agent/pull/readers.py",
        "        while room_left(self._store) < self._claimed_bytes():",
        "        while False:",
        ("tests/system/test_strangers.py::test_reading_evicts_nothing_that_was_pulled",),
    ),
    Mutant(
        "keep what came for readers",
        "p2pdist/agent/pull/readers.py",
        "            blob.last_used = UNUSED_SINCE",
        "            pass",
        ("tests/system/test_strangers.py::test_reading_evicts_nothing_that_was_pulled",),
    ),
    Mutant(
        "the mirror is asked after the others",
        "p2pdist/cli/runtimes/edits.py",
        "    if not isinstance(hosts, dict) or next(iter(hosts), None) != url:",
        "    if not isinstance(hosts, dict) or url not in hosts:",
        ("tests/cli/test_mirror_install.py",),
    ),
    Mutant(
        "take an edited file for our own",
        "p2pdist/cli/runtimes/installation.py",
        "    if kept is not None and text_digest(current) == kept.wrote:",
        "    if kept is not None:",
        ("tests/cli/test_mirror_install.py",),
    ),
    Mutant(
        "a token is not asked about",
        "p2pdist/agent/api/hub.py",
        "        await self._agent.models.admit(name, token)\n",
        "",
        ("tests/gateway/test_hub_door.py::test_a_private_repository_is_for_clients_that_may_read_it",),
    ),
    Mutant(
        "a block passes by what the transport holds",
        "p2pdist/transfer/openssl/server.py",
        " or below.get_write_buffer_size() or ",
        " or ",
        ("tests/transfer/test_openssl_server.py",),
    ),
    Mutant(
        "a child moves to no host that is behind",
        "tracker/core/rebalance/overload.py",
        "max(self.behind, BEHIND_SHARE * max(0.0, above.load / above.slots - 1) * rest)",
        "self.behind",
        ("tests/simulate/test_wan.py",),
    ),
    Mutant(
        "a leaf is exchanged for one that waits",
        "tracker/core/rebalance/overload.py",
        "if not leaves or carrier.counts[stripe] + self.behind < late.counts[stripe]:",
        "if not leaves:",
        ("tests/tracker/test_overload.py",),
    ),
    Mutant(
        "a site imports twice",
        "tracker/core/planning/single_import.py",
        "        if len(importers) > 1:",
        "        if len(importers) > 2:",
        ("tests/tracker/test_sites.py",),
    ),
    Mutant(
        "all sites read where a root is lost",
        "tracker/core/planning/planner.py",
        " or self._others_read(member, roots)",
        "",
        ("tests/tracker/test_sites.py",),
    ),
    Mutant(
        "a small file is not compared",
        "p2pdist/origin/huggingface/hub.py",
        "        if len(data) != file.size or git_oid(data) != file.oid:",
        "        if len(data) > 2 * file.size + 100:",
        ("tests/tracker/test_hubs.py::test_what_is_wrong_is_not_kept",),
    ),
    Mutant(
        "a name of a file leads elsewhere",
        "p2pdist/model/hub.py",
        '    bad = any(segment in ("", ".", "..") for segment in segments)',
        '    bad = any(segment in ("", ".") for segment in segments)',
        ("tests/model/test_hub_names.py",),
    ),
)


def copy_tree(target: Path) -> None:
    """Copy the files of the project, without what builds leave."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", ".*_cache", "*.egg-info", "test-output", ".hypothesis"
    )
    shutil.copytree(ROOT, target, ignore=ignored, symlinks=True)


def break_code(tree: Path, mutant: Mutant) -> None:
    """Make the change; raises ValueError unless the old text is there exactly once."""
    file = tree / mutant.file
    if not file.is_file():
        raise ValueError(f"{mutant.file} does not exist")
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.file} holds the old text {text.count(mutant.old)} times, not once: {mutant.old.strip()!r}"
        )
    file.write_text(text.replace(mutant.old, mutant.new))
    compile(file.read_text(), str(file), "exec")


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit code of pytest in the copy, and the first failing test or the last line it printed. A
    run that hangs has noticed."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {TIMEOUT_S} s"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (named or lines or [""])[-1]


def try_mutant(mutant: Mutant, place: Path, passing: dict[tuple[str, ...], str]) -> tuple[bool, str]:
    """Whether the tests noticed the mutant, and which one did or what is wrong."""
    if mutant.tests not in passing:
        code, line = run_tests(place / "unchanged", mutant.tests)
        passing[mutant.tests] = "" if code == 0 else f"the tests fail without any change ({line})"
    if passing[mutant.tests]:
        return False, passing[mutant.tests]
    tree = place / "mutant"
    copy_tree(tree)
    try:
        break_code(tree, mutant)
        code, line = run_tests(tree, mutant.tests)
    except (ValueError, SyntaxError) as error:
        return False, str(error)
    finally:
        shutil.rmtree(tree)
    if code > FAILED:
        return False, f"the tests could not run ({line})"
    return code == FAILED, line


def main() -> int:
    """Try the mutants named on the command line, or all; 0 when each was noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try (default: all)")
    parser.add_argument("--list", action="store_true", help="name the mutants and stop")
    options = parser.parse_args()
    unknown = set(options.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may be head
        for mutant in chosen:
            print(f"{mutant.name:<28} {mutant.file}: {mutant.old.strip()}  =>  {mutant.new.strip()}")
        return 0
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="p2pdist-mutants-") as name:
        place = Path(name)
        copy_tree(place / "unchanged")
        passing: dict[tuple[str, ...], str] = {}
        print(f"{'mutant':<28} {'verdict':<10} {'seconds':>7}  noticed by")
        for mutant in chosen:
            began = time.monotonic()
            noticed, line = try_mutant(mutant, place, passing)
            unnoticed += not noticed
            print(
                f"{mutant.name:<28} {'noticed' if noticed else 'UNNOTICED':<10} {time.monotonic() - began:7.1f}  {line}"
            )
    print(f"{len(chosen) - unnoticed} of {len(chosen)} mutants noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
