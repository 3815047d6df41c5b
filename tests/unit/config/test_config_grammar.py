"""The flags of structured output: the default by what is installed, and what excludes what."""

from __future__ import annotations

import pytest

from ceiba.config.choose import grammar_backend
from ceiba.core.errors import ConfigError


@pytest.mark.parametrize(
    ("asked", "packages", "chosen"),
    [
        (None, (), "llguidance"),
        (None, ("xgrammar",), "xgrammar"),
        ("llguidance", ("xgrammar",), "llguidance"),
        ("outlines", ("outlines_core",), "outlines"),
        ("none", (), "none"),
    ],
)
def test_backend(asked, packages, chosen):
    assert grammar_backend(asked, packages) == chosen


@pytest.mark.parametrize("asked", ["xgrammar", "outlines"])
def test_a_backend_that_is_not_installed_is_refused_with_the_way_out(asked):
    with pytest.raises(ConfigError, match=f"pip install 'ceiba\\[{asked}\\]'"):
        grammar_backend(asked, ())
