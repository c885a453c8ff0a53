"""The model's own assertions are to show their values, as those of the tests do."""

import pytest

pytest.register_assert_rewrite("tests.model.model", "tests.model.pair")
