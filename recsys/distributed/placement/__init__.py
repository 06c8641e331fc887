"""Placement of tables as data: no tensors, no process group.

`plan` has the classes of a plan and `plan_json` its file format. `strategies` converts a plan to
rectangles, which `layout` compiles for the stages. `plan_layout`, `layout_plot` and `traffic` show
a layout without a job.
"""
