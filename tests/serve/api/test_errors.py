"""What the server answers for an error of the engine."""

from __future__ import annotations

import pytest

from headrace.errors import AdapterSlotsError
from headrace.serve.adapters import Adapters
from headrace.serve.api.errors import as_api_error


def test_all_adapter_slots_in_use_is_a_conflict() -> None:
    adapters = Adapters(max_loras=1)
    adapters.add("a", lambda _: None)
    adapters.hold("a", 1)
    with pytest.raises(AdapterSlotsError) as caught:
        adapters.add("a", lambda _: None, replace=True)
    answer = as_api_error(caught.value)
    assert (answer.code, answer.body()["error"]["type"]) == (409, "ConflictError")
    assert "the old version still answers" in answer.message
