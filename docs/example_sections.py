"""Our docstrings say ``Example:``; the documentation's parser knows ``Examples:`` as code."""

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section while the documentation is built."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
