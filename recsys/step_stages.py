"""Public path of `recsys.base.step_stages`."""

from recsys.base.step_stages import observe as observe
