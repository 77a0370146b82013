"""What must never be trained on is an error that names the request; nothing becomes 0.0."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from relax.engines.base import BadResult, Request
from relax.engines.vllm_result import result_of

REQUEST = Request("g7.1.3", np.array([5], np.int32), max_tokens=3)


def output(**changed):
    span = SimpleNamespace(version="2.17", start=0, end=3)
    fields = {
        "token_ids": [4, 5, 6],
        "logprobs": SimpleNamespace(logprobs=[-0.5, -1.0, 0.0]),
        "finish_reason": "length",
        "weight_versions": [span],
    }
    return SimpleNamespace(outputs=[SimpleNamespace(**(fields | changed))])


def test_whole_output_becomes_a_result() -> None:
    result = result_of(REQUEST, output())
    assert result.token_ids.tolist() == [4, 5, 6]
    assert result.logprobs.tolist() == [-0.5, -1.0, 0.0]
    assert result.runs == ((17, 3),)


def test_aborted_request_without_tokens_is_an_empty_result() -> None:
    empty = output(token_ids=[], logprobs=None, finish_reason="abort", weight_versions=None)
    result = result_of(REQUEST, empty)
    assert (len(result.token_ids), result.runs, result.finish_reason) == (0, (), "abort")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logprobs": SimpleNamespace(logprobs=[-1.0, None, -1.0])}, r"token 1 of 3 \(id 5\) is None"),
        ({"logprobs": SimpleNamespace(logprobs=[-1.0, -1.0, math.nan])}, r"token 2 of 3 \(id 6\) is nan"),
        ({"logprobs": SimpleNamespace(logprobs=[-math.inf, -1.0, -1.0])}, r"token 0 of 3 \(id 4\) is -inf"),
        ({"logprobs": SimpleNamespace(logprobs=[0.5, -1.0, -1.0])}, r"token 0 of 3 \(id 4\) is 0.5"),
        ({"logprobs": SimpleNamespace(logprobs=[-1.0, -1.0])}, "2 log-probs for 3 tokens"),
        ({"logprobs": None}, "0 log-probs for 3 tokens"),
        ({"finish_reason": "error"}, "finish reason 'error'"),
        ({"finish_reason": None}, "finish reason None"),
        ({"token_ids": [], "logprobs": None}, "without a token"),
        ({"weight_versions": None}, "do not add up to 3"),
        ({"weight_versions": [SimpleNamespace(version="2.17", start=0, end=2)]}, "do not add up to 3"),
        ({"weight_versions": [SimpleNamespace(version="default", start=0, end=3)]}, "default"),
    ],
)
def test_bad_output_is_refused_with_the_request_named(changed: dict, message: str) -> None:
    with pytest.raises(BadResult, match=rf"request g7\.1\.3.*{message}"):
        result_of(REQUEST, output(**changed))
