"""Planning: from a model, a cluster and settings to a plan, which a back end compiles into a bundle.

options       settings of planning and compiling, each once
model         a model as it was imported, and a file that models are read from
plan          a planned model
pipeline      runs the passes
search        lets the planner choose; tries are what it chooses among, choice what it found, refine asks the simulator
forecast      the simulated run of a module, and prediction what it says of a plan
facts         a plan as plain data; explain the same as text
plan_file     a plan as a file that people edit
hints         placement hints of models
build         compiles a plan into a bundle
replan        plans a bundle anew for other devices
watching      who is shown what planning does
"""
