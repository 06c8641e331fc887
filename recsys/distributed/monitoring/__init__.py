"""Tools that observe a training job.

`watchdog` reports late ranks and ends a job when one rank fails, `preemption` ends it at the
request of a scheduler, `loss_guard` reports bad losses,
and `step_report` measures the stages of steps.
"""
