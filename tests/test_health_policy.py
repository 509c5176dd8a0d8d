from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.config.model import XID_ACTIONS, XidRule
from _nvplug.health.policy import APPLICATION_XIDS, XIDS, Action, health_policy

REFERENCE = {13, 31, 43, 45, 68, 109}


def counts(disable: str = "", enable: str = "", *, code: int = 79) -> bool:
    """Whether an XID takes a GPU away."""
    return health_policy(disable, enable).row(code) is not None


def test_what_the_reference_ignores_is_ignored() -> None:
    """13, 31, 43, 45, 68 and 109, as in NVIDIA's plugin; and 94, which NVIDIA's catalogue calls contained."""
    assert REFERENCE | {94} <= APPLICATION_XIDS
    assert not APPLICATION_XIDS & {46, 48, 62, 64, 74, 79, 95, 119, 120, 140, 143, 154, 158}


@pytest.mark.parametrize("code", sorted(XIDS))
def test_each_row_says_what_to_do(code: int) -> None:
    """A row names its meaning; one that takes a GPU away has a remedy that works while nvplug runs."""
    row = XIDS[code]

    assert row.meaning
    assert row.action.spares or "nvidia-smi -r" in row.remedy or "reboot" in row.remedy
    assert row.back.value


@pytest.mark.parametrize(
    ("disable", "enable", "code", "expected"),
    [
        ("", "", 79, True),
        ("", "", 13, False),
        ("", "", 4711, True),
        ("79", "", 79, False),
        ("79", "", 48, True),
        ("xids", "", 79, False),
        ("XIDS", "", 79, False),
        ("all", "", 79, False),
        ("All", "", 79, False),
        ("31,all", "", 79, False),
        ("", "13", 13, True),
        ("", "all", 13, True),
        ("", "xids", 13, True),
        ("11", "11", 11, True),
        # NVIDIA's own plugin fails at this one.
        ("all", "79", 79, True),
        ("all", "79", 48, False),
        ("xids", "79", 79, True),
        ("all", "all", 79, True),
        ("all", "all", 13, True),
        ("79", "all", 79, True),
        (" 68 , ,67,", "", 67, False),
        ("68  ", "", 68, False),
    ],
)
def test_the_variables(disable: str, enable: str, code: int, expected: bool) -> None:
    """DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS mean what their documentation says: enabling wins."""
    assert counts(disable, enable, code=code) is expected


@pytest.mark.parametrize(
    ("disable", "enable", "checks"),
    [("", "", True), ("xids", "", True), ("all", "", False), ("all", "79", False), ("all", "all", True)],
)
def test_checks(disable: str, enable: str, checks: bool) -> None:
    """What nvplug finds by looking is off after ``all`` alone."""
    assert health_policy(disable, enable).checks is checks


@pytest.mark.parametrize("item", ["not-an-int", "-68", "6.8", "0x44", "٣", "9" * 5000])
def test_malformed_items_are_named(item: str) -> None:
    """What makes no sense is left out and named, with its variable; the rest counts."""
    policy = health_policy(f"68,{item},67", item)

    assert policy.malformed == (f"{item!r} in DP_DISABLE_HEALTHCHECKS", f"{item!r} in DP_ENABLE_HEALTHCHECKS")
    assert policy.disabled == {67, 68}
    assert policy.enabled == frozenset()


@given(st.text(), st.text())
def test_nothing_that_is_written_breaks_it(disable: str, enable: str) -> None:
    """Any text makes a policy, and a line."""
    assert health_policy(disable, enable).summary


@pytest.mark.parametrize(
    ("disable", "enable", "summary"),
    [
        (
            "79",
            "13,94",
            (
                "every XID takes a GPU away but 8,31,32,39-41,43,45,63,68-72,75-77,79,80,82-86,88,89,92,93,96-109,121,"
                "126-135,137,139,141,147,148,157,160,161; checks are on"
            ),
        ),
        ("all", "79,48", "no XID takes a GPU away but 48,79; checks are off"),
        ("xids", "", "no XID takes a GPU away; checks are on"),
        ("", "all", "every XID takes a GPU away; checks are on"),
    ],
)
def test_summary(disable: str, enable: str, summary: str) -> None:
    """The policy in force, on one line."""
    assert health_policy(disable, enable).summary == summary


@pytest.mark.parametrize(
    ("disable", "enable", "word", "code", "action"),
    [
        ("", "", "ignore", 79, None),
        ("", "", "reset", 63, Action.RESET),
        ("", "", "reboot", 48, Action.REBOOT),
        ("", "", "ask-driver", 94, Action.ASK_DRIVER),
        ("", "", "ignore", 4711, None),
        # Variables win over the file, as everywhere.
        ("63", "", "reset", 63, None),
        ("all", "", "reset", 63, None),
        ("", "79", "ignore", 79, Action.RESET),
        ("", "all", "ignore", 79, Action.RESET),
        ("", "48", "reboot", 48, Action.REBOOT),
        ("79", "79", "ignore", 79, Action.RESET),
    ],
)
def test_the_file(disable: str, enable: str, word: str, code: int, action: Action | None) -> None:
    """What it says of an XID goes before the table, and after the variables; of other XIDs nothing is changed."""
    policy = health_policy(disable, enable, [XidRule(code, word)])
    row = policy.row(code)

    assert (row and row.action) == action
    assert policy.row(119) == health_policy(disable, enable).row(119)


def test_every_word_of_the_file_means_something() -> None:
    """What the file may say, the policy knows; and its line in the log has it."""
    for word in XID_ACTIONS:
        policy = health_policy("", "", [XidRule(79, word), XidRule(63, word)])

        assert ("79" in policy.summary) is (word == "ignore")
        assert ("63" in policy.summary) is (word == "ignore")


def test_an_enabled_application_error_asks_for_a_reset() -> None:
    """An operator who fears an error gets the evidence of the fatal ones for it."""
    row = health_policy("", "31").row(31)

    assert row is not None
    assert row.action is Action.RESET
