"""The fields of requests, without a server."""

import pytest
from pydantic import ValidationError

from gearbx_mlx.server.requests import BaseRequest


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "0.5"), ("top_p", True), ("min_p", "0"), ("max_tokens", "5"), ("seed", 1.0)]
)
def test_number_of_a_different_type_is_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        BaseRequest.model_validate({field: value})
