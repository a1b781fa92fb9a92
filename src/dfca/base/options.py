"""Tables of options that users make themselves: what is wrong with them is one sentence."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic._internal._model_construction import ModelMetaclass

from dfca.base.validation import explain


class _Explaining(ModelMetaclass):
    """Turn pydantic's error into a ConfigError where a user calls the class; a file is explained as a whole."""

    def __call__(cls, *values: Any, **named: Any) -> Any:
        try:
            return super().__call__(*values, **named)
        except ValidationError as error:
            raise explain(error.errors(), cls) from None


class ExplainedModel(BaseModel, metaclass=_Explaining):
    """A model of pydantic whose errors are sentences."""
