"""A run on rented machines, through engines that exist.

machines.py    what Google Cloud and SkyPilot call a slice, and how many hosts it has
request.py     what is to be run, checked
skypilot.py    a task file
gke.py         a JobSet and its recipe
gcloud.py      a script: queued resource, set-up, run, recovery of spot machines
"""

from headrace.launch.request import ENGINES, LaunchRequest, write_launch

__all__ = ["ENGINES", "LaunchRequest", "write_launch"]
