"""Griffe extension: docstrings use the heading `Example:`, the parser expects `Examples:`."""

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section while the documentation is built."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
