"""A JobSet for GKE: one indexed job, one pod a host, and the recipe as a ConfigMap.

GKE gives the pods of a slice TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, from which JAX finds its
processes. With a queue the JobSet waits for Kueue to admit it.
"""

from __future__ import annotations

from typing import Any

from headrace.launch.machines import TPU_NAMES, chips_per_host, topology
from headrace.launch.request import LaunchRequest, yaml_text

RECIPE, OUTPUT = "/recipe", "/headrace-output"


def jobset(request: LaunchRequest) -> dict[str, Any]:
    """The JobSet (jobset.x-k8s.io/v1alpha2)."""
    metadata: dict[str, Any] = {
        "name": request.name,
        # One job has a slice for itself.
        "annotations": {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        },
    }
    if request.queue is not None:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": request.queue}
    job = {
        "parallelism": request.hosts,
        "completions": request.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one lost pod ends the job; the JobSet starts all of them again
        "template": _pod(request),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": request.restarts},
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(request: LaunchRequest) -> dict[str, Any]:
    wanted = request.slice
    chips = {"google.com/tpu": chips_per_host(wanted)}
    selector = {
        "cloud.google.com/gke-tpu-accelerator": TPU_NAMES[wanted.chip.name].gke,
        "cloud.google.com/gke-tpu-topology": topology(wanted),
    }
    mounts = [{"name": "recipe", "mountPath": RECIPE, "readOnly": True}]
    volumes: list[dict[str, Any]] = [{"name": "recipe", "configMap": {"name": request.name}}]
    output = f"/tmp/{request.name}"
    annotations: dict[str, str] = {}
    if request.bucket is not None:
        annotations["gke-gcsfuse/volumes"] = "true"
        mounts.append({"name": "output", "mountPath": OUTPUT})
        driver = {
            "driver": "gcsfuse.csi.storage.gke.io",
            "volumeAttributes": {"bucketName": request.bucket},
        }
        volumes.append({"name": "output", "csi": driver})
        output = f"{OUTPUT}/{request.name}"
    if request.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    container: dict[str, Any] = {
        "name": "headrace",
        "image": request.image,
        "command": ["bash", "-c", request.train(f"{RECIPE}/{request.recipe_name}", output)],
        "resources": {"requests": chips, "limits": chips},
        "volumeMounts": mounts,
    }
    if request.secret is not None:
        reference = {"secretKeyRef": {"name": request.secret, "key": "HF_TOKEN"}}
        container["env"] = [{"name": "HF_TOKEN", "valueFrom": reference}]
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 300,  # SIGTERM saves a checkpoint
        "nodeSelector": selector,
        "containers": [container],
        "volumes": volumes,
    }
    return (
        {"metadata": {"annotations": annotations}, "spec": spec} if annotations else {"spec": spec}
    )


def files(request: LaunchRequest) -> tuple[dict[str, str], list[str]]:
    """jobset.yaml (the recipe's ConfigMap and the JobSet), and what starts it."""
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": request.name},
        "data": {request.recipe_name: request.recipe},
    }
    texts = {"jobset.yaml": yaml_text(recipe, jobset(request))}
    return texts, ["kubectl", "apply", "-f", "jobset.yaml"]
