"""What a run needs, how long it takes and what it costs, before anything is rented.

hardware.py  chips, slices, GPU machines        prices.py    dollars an hour, dated
shape.py     a model from its config.json       workload.py  tokens of a dataset
candidate.py slice, mesh, batch, remat          measure.py   a dataset at hand
analytic.py  memory and time without a compiler guard.py     runs that cannot fit
program.py   the run's own step, lowered        topology.py  devices that nobody has rented
compiled.py  compiled: memory by cause, time    hlo.py, loops.py, replay.py  reading a schedule
compiler.py, worker.py, cache.py                processes that compile, reports kept on disk
planner.py   plans                              search.py, advice.py  better ones
automatic.py what a run leaves open             serving.py   answers instead of training
serving_program.py  the engine's own programs   serving_compiled.py  compiled and replayed
report.py, page.py, pictures.py                 how they are shown
"""

from headrace.plan.planner import Plan, make_plan, read_subject
from headrace.plan.search import search

__all__ = ["Plan", "make_plan", "read_subject", "search"]
