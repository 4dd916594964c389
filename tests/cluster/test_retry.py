import pytest
from cedar.cluster.retry import Failure, Plan, plan
from grpc import StatusCode

UNAVAILABLE, INTERNAL, BUSY = StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("failure", "facts", "expected"),
    [
        pytest.param(
            Failure(called="prefill", code=StatusCode.INVALID_ARGUMENT),
            {},
            Plan(action="fail", status=StatusCode.INVALID_ARGUMENT),
            id="the caller's fault is told",
        ),
        pytest.param(
            Failure(called="prefill", code=UNAVAILABLE),
            {},
            Plan(action="elsewhere", exclude="prefill", suspect=True),
            id="Prefill gone",
        ),
        pytest.param(
            Failure(called="encoder", code=UNAVAILABLE),
            {},
            Plan(action="elsewhere", exclude="encoder", suspect=True),
            id="Encoder gone",
        ),
        pytest.param(
            Failure(called="prefill", code=UNAVAILABLE, blamed="decode"),
            {},
            Plan(action="elsewhere", exclude="decode"),
            id="Prefill could not reach Decode",
        ),
        pytest.param(
            Failure(called="decode", code=UNAVAILABLE),
            {"streamed": True},
            Plan(action="resume", exclude="decode", suspect=True),
            id="Decode died mid-stream",
        ),
        pytest.param(
            Failure(called="decode", code=INTERNAL),
            {"streamed": True},
            Plan(action="resume", exclude="decode"),
            id="Decode has a bug: excluded, but alive",
        ),
        pytest.param(
            Failure(called="prefill", code=StatusCode.NOT_FOUND, blamed="encoder"),
            {},
            Plan(action="encode"),
            id="features expired",
        ),
        pytest.param(
            Failure(called="prefill", code=StatusCode.FAILED_PRECONDITION, blamed="decode"),
            {},
            Plan(action="elsewhere", exclude="decode"),
            id="Decode restarted",
        ),
        pytest.param(
            Failure(called="prefill", code=BUSY, retry_after_ms=250),
            {"attempts": 99},
            Plan(action="wait", exclude="prefill", delay_ms=250),
            id="busy uses no attempt",
        ),
        pytest.param(
            Failure(called="prefill", code=BUSY, blamed="decode", retry_after_ms=250),
            {},
            Plan(action="wait", exclude="decode", delay_ms=250),
            id="Decode is busy",
        ),
        pytest.param(
            Failure(called="prefill", code=BUSY, retry_after_ms=2000),
            {"remaining_s": 1},
            Plan(action="fail", status=BUSY, delay_ms=2000),
            id="busy beyond the deadline",
        ),
        pytest.param(
            Failure(called="prefill", code=UNAVAILABLE),
            {"attempts": 4},
            Plan(action="fail", status=UNAVAILABLE),
            id="enough attempts",
        ),
        pytest.param(
            Failure(called="prefill", code=INTERNAL),
            {"attempts": 4},
            Plan(action="fail", status=INTERNAL),
            id="enough attempts, and a bug",
        ),
        pytest.param(
            Failure(called="prefill", code=UNAVAILABLE),
            {"remaining_s": 0},
            Plan(action="fail", status=StatusCode.DEADLINE_EXCEEDED),
            id="too late",
        ),
    ],
)
def test_plan(failure: Failure, facts: dict[str, object], expected: Plan) -> None:
    given = {"attempts": 1, "max_attempts": 4, "streamed": False, "remaining_s": 60, **facts}
    assert plan(failure, **given) == expected  # type: ignore[arg-type]


def test_every_status_has_a_plan() -> None:
    for code in StatusCode:
        for called in ("encoder", "prefill", "decode"):
            failure = Failure(called=called, code=code)
            assert plan(failure, attempts=1, max_attempts=4, streamed=True, remaining_s=9).action
            last = plan(failure, attempts=4, max_attempts=4, streamed=True, remaining_s=9)
            assert last.action in ("fail", "wait")
            assert last.status is not StatusCode.OK
