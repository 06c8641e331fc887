"""Where tables go, as data: no tensors, no process group.

`plan` is what a plan says and `plan_json` its file. `strategies` turns it into rectangles,
which `layout` compiles for the stages; `plan_layout`, `layout_plot` and `traffic` show
them.
"""
