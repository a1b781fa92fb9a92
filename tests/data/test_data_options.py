"""The [data] table, and what importing it may cost."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from dfca.base.errors import ConfigError
from dfca.data.options import DataOptions
from dfca.data.options import DataOptions as Direct


def test_the_defaults_are_the_quickstart():
    options = DataOptions()
    assert (options.name, options.partition, options.transform) == ("digits", "rotated", "auto")
    assert DataOptions is Direct


def test_options_are_frozen_and_closed():
    with pytest.raises(ConfigError, match='unknown key "nmae"; did you mean "name"'):
        DataOptions(nmae="mnist")
    with pytest.raises(ValidationError):
        DataOptions().name = "mnist"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"alpha": 0.8}, "alpha must be 1 without skew, got 0.8"),
        ({"skew": "consistent", "transform": "none"}, 'needs a transform other than "none"'),
        ({"angles": (0, 90), "transform": "label-permutation"}, "angles have no meaning"),
        ({"alpha": 1.5, "skew": "consistent"}, "alpha must be > 0 and <= 1, got 1.5"),
        ({"alpha": 0, "skew": "consistent"}, "alpha must be > 0 and <= 1, got 0"),
        ({"samples_per_client": 0}, "samples_per_client must be >= 1, got 0"),
        ({"test_share": 1.0}, "test_share must be > 0 and < 1, got 1.0"),
        ({"concentration": 0}, "concentration must be > 0, got 0"),
        ({"angles": (float("nan"),)}, "must be a finite number, got NaN"),
        ({"samples_per_client": "24"}, 'samples_per_client must be an integer, got "24"'),
        ({"partition": "rotate"}, 'partition must be "rotated", "owner", "uneven" or "dirichlet", got "rotate"'),
    ],
)
def test_values_out_of_range_are_refused(values, sentence):
    with pytest.raises(ConfigError, match=sentence):
        DataOptions(**values)


def test_angles_may_be_a_list_as_in_toml():
    assert DataOptions(angles=[0, 45]).angles == (0.0, 45.0)


def test_every_key_is_described():
    assert all(field.description for field in DataOptions.model_fields.values())


def test_options_and_catalogue_load_no_heavy_library():
    code = (
        "import sys; from dfca.data.options import DataOptions; DataOptions()\n"
        "assert not {'torch', 'sklearn', 'pooch', 'requests'} & set(sys.modules), 'options'\n"
        "import os; os.environ['DFCA_DATA'] = 'nowhere'\n"
        "from dfca.data.registry import catalogue; catalogue()\n"
        "assert not {'torch', 'sklearn', 'pooch', 'requests'} & set(sys.modules), 'catalogue'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import dfca.data

    with pytest.raises(AttributeError, match="nothing"):
        _ = dfca.data.nothing
