"""Rights, patterns of packages, and tickets."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.access import (
    ANONYMOUS,
    OPEN,
    SKEW_S,
    TICKET_ALONE_S,
    LocalRules,
    Patterns,
    Role,
    RoleDocument,
    Ticket,
    agent_identity,
    check_ticket,
    decode_ticket,
    encode_ticket,
    joined_with,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import NotFound, Refused, Unauthenticated, UsageError

BLOB, OTHER = digest_of(b"a"), digest_of(b"b")


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*", "team/trainer", True),
        ("team/*", "team/trainer", True),
        ("team/*", "team/a/b", True),
        ("team/*", "team", False),
        ("team/*", "teams/trainer", False),
        ("team/*", "team-b/trainer", False),
        ("team/trainer", "team/trainer", True),
        ("team/trainer", "team/trainer2", False),
        ("team/trainer", "team/trainer/x", False),
        ("hf.co/Qwen/*", "hf.co/Qwen/Qwen2.5-7B", True),
        ("hf.co/Qwen/*", "hf.co/QwenX/Qwen2.5-7B", False),
        ("hf.co/meta-llama/Llama-3.1-8B", "hf.co/meta-llama/Llama-3.1-8B", True),
        ("hf.co/datasets/HuggingFaceH4/*", "hf.co/datasets/HuggingFaceH4/a", True),
    ],
)
def test_patterns_go_by_component(pattern, name, matches):
    assert Patterns.parse([pattern], "here").match(name) is matches


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "team/tr*",
        "te*m/x",
        "/team",
        "team/",
        "TEAM/*",
        "team/*/x",
        "**",
        "a b",
        "t:v1",
        "*\n",
        "hf.co/Q*",
        "hf.co/A/b/c/d",
    ],
)
def test_what_matches_no_name_is_refused(pattern):
    with pytest.raises(UsageError, match="here"):
        Patterns.parse([pattern], "here")


names = st.sampled_from(["a", "a/b", "a/b/c", "ab/c", "b", "b/c"])
patterns = st.lists(st.sampled_from(["*", "a", "a/*", "a/b", "a/b/*", "b/*", "ab/*"]), max_size=4)


@given(patterns, st.sampled_from(["*", "a", "a/*", "a/b", "a/b/*", "b/*", "ab/*"]), names)
def test_what_contains_a_pattern_matches_all_that_it_matches(own, pattern, name):
    held, inner = Patterns(tuple(own)), Patterns((pattern,))
    if held.contains(pattern) and inner.match(name):
        assert held.match(name)


@pytest.mark.parametrize(
    ("own", "pattern", "contained"),
    [
        ("team/*", "team/a", True),
        ("team/*", "team/a/*", True),
        ("team/*", "team/*", True),
        ("*", "team/*", True),
        ("team/a/*", "team/a", False),
        ("team/a", "team/a/*", False),
        ("team/*", "teams/*", False),
        ("team/*", "*", False),
    ],
)
def test_a_pattern_contains_what_is_below_it(own, pattern, contained):
    assert Patterns((own,)).contains(pattern) is contained


def test_a_stranger_needs_a_credential_and_others_a_right():
    with pytest.raises(Unauthenticated):
        ANONYMOUS.require("rank")
    with pytest.raises(Refused) as refusal:
        agent_identity("h1", Patterns(("*",))).require("preseed")
    assert not isinstance(refusal.value, Unauthenticated)
    OPEN.require("cancel-any")
    ANONYMOUS.require("open")


def test_what_may_not_be_read_is_not_there():
    reader = agent_identity("h1", Patterns(("team/*",)))
    reader.require_read(["other/x", "team/a"], "the blob")
    with pytest.raises(NotFound):
        reader.require_read(["other/x"], "the blob")
    with pytest.raises(NotFound):
        reader.require_read([], "the blob")
    agent_identity("h2", Patterns(("*",))).require_read([], "the blob")


def test_a_role_has_the_rights_that_it_names_and_no_other():
    role = Role.parse("slurm", RoleDocument(("preseed", "rank"), ("team/*",)))
    someone = role.identity("token", "7f3a")
    assert {right for right in ("rank", "preseed", "cancel-any", "watch", "read", "agent") if someone.may(right)} == {
        "rank",
        "preseed",
        "read",
    }
    for right in ("agent", "local-admin", "ticket", "root"):
        with pytest.raises(UsageError, match="no right"):
            Role.parse("odd", RoleDocument((right,)))


def test_local_rules_join_what_the_user_and_its_groups_may_read():
    rules = LocalRules({"group:a": Patterns(("a/*",)), "user:joe": Patterns(("b/*",))})
    assert rules.patterns(["user:joe", "group:a", "group:x"]).patterns == ("b/*", "a/*")
    assert rules.patterns(["user:eve"]).patterns == ()
    assert LocalRules().patterns(["user:eve"]).everything


def sign(message):
    return hashlib.sha512(b"secret" + message).digest()


def verify(key, message, signature):
    return key == "k1" and signature == sign(message)


def test_a_ticket_holds_for_its_blob_receiver_and_time():
    ticket = decode_ticket(encode_ticket(Ticket("k1", BLOB, "h1", "start", 1000.0), sign), verify)
    check_ticket(ticket, blob=BLOB, receiver="h1", alone=False, now=1000.0 + SKEW_S)
    check_ticket(ticket, blob=BLOB, receiver="h1", alone=True, now=1000.0 + SKEW_S + TICKET_ALONE_S)
    for blob, receiver, alone, now in (
        (OTHER, "h1", False, 0.0),
        (BLOB, "h2", False, 0.0),
        (BLOB, "h1", False, 1001.0 + SKEW_S),
        (BLOB, "h1", True, 1001.0 + SKEW_S + TICKET_ALONE_S),
    ):
        with pytest.raises(Refused):
            check_ticket(ticket, blob=blob, receiver=receiver, alone=alone, now=now)
    for receiver in ("*", "h*", ""):
        with pytest.raises(Refused):
            check_ticket(
                Ticket("k1", BLOB, receiver, "start", 0.0), blob=BLOB, receiver="h1", join="a", alone=False, now=0.0
            )


def test_a_ticket_for_a_join_token_holds_for_hosts_that_came_with_it():
    """No host gets one by its name, and none of another authority's by a join token."""
    ticket, other = (Ticket("k1", BLOB, joined_with(join), "start", 0.0) for join in ("a", ""))
    check_ticket(ticket, blob=BLOB, receiver="h1", join="a", alone=False, now=0.0)
    check_ticket(other, blob=BLOB, receiver="h1", join="", alone=False, now=0.0)
    for shown, host, join in (
        (ticket, "h1", "b"),
        (ticket, "h1", ""),
        (ticket, "h1", None),
        (ticket, "a", None),
        (ticket, "join:a", "b"),
        (ticket, "join:a", None),
        (other, "h1", "a"),
        (other, "join:", "a"),
    ):
        with pytest.raises(Refused):
            check_ticket(shown, blob=BLOB, receiver=host, join=join, alone=False, now=0.0)


def test_a_ticket_of_another_key_is_none():
    with pytest.raises(Refused):
        decode_ticket(encode_ticket(Ticket("k2", BLOB, "h1", "start", 1000.0), sign), verify)


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_changed_ticket_is_none(place, change):
    import base64

    text = encode_ticket(Ticket("k1", BLOB, "h1", "start", 1000.0), sign)
    data = bytearray(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    data[place % len(data)] ^= change
    with pytest.raises(Refused):
        decode_ticket(base64.urlsafe_b64encode(bytes(data)).decode().rstrip("="), verify)


@given(st.text(max_size=300))
def test_any_text_is_a_ticket_or_refused(text):
    with pytest.raises(Refused):
        decode_ticket(text, verify)
