"""Planning: from a model, a cluster and settings to a plan, which a back end compiles into a bundle.

options       the settings of planning and compiling, each once
model         a model as it was imported, and a file that models are read from
plan          a planned model
pipeline      runs the passes
search        lets the planner choose; tries are the plans it chooses among, choice is its result
predict       the predictions of the simulator for a plan
facts         a plan as plain data; explain shows the same as text
plan_file     a plan as a file that people edit
offloading    what is elsewhere or computed again, chosen by price
hints         placement hints of models
build         compiles a plan into a bundle
replan        plans a bundle anew for other devices
watching      the feedback that planning gives its caller
"""
