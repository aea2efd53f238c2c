"""The server on many machines, by Ray Serve: replicas of the engine behind OpenAI's interface.

serve run quire.integrations.ray:app model=path/to/checkpoint num_replicas=2
"""

from quire.distribution import pip_install

try:
    from ray import serve
except ImportError as error:
    raise ImportError(f"this needs Ray Serve: {pip_install('ray')} ({error})") from error

from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from quire.integrations.ray.ingress import Ingress
from quire.integrations.ray.replica import Replica
from quire.integrations.ray.settings import Settings

__all__ = ["Settings", "app"]

# An ingress only passes requests on, so it takes many at once: replicas bound them.
_INGRESS_REQUESTS = 1 << 16
_ROUTER = RequestRouterConfig(
    request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    # A request is offered to all replicas before it waits.
    request_router_kwargs={"num_fallback_replicas": 1 << 16},
)


def app(settings: Settings) -> Application:
    """The application, for `serve run`, a config file of Ray Serve, or `serve.run(app(Settings(...)))`.

    It has two deployments. "Engine" has the replicas, each with an engine and the application of `quire.server`.
    "Ingress" speaks HTTP and passes each request on to a replica. Ray's consistent hashing chooses the one that gets
    prompts that begin like this one, and the next one on its ring if that one has `max_ongoing_requests`.
    """
    engine = serve.deployment(Replica).options(
        name="Engine",
        num_replicas=settings.num_replicas,
        autoscaling_config=settings.autoscaling_config,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.max_queued_requests,
        ray_actor_options=settings.ray_actor_options,
        health_check_period_s=settings.health_check_period_s,
        graceful_shutdown_timeout_s=settings.limits.grace,
        request_router_config=_ROUTER,
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="Ingress",
        num_replicas=settings.ingress_replicas,
        max_ongoing_requests=_INGRESS_REQUESTS,
        ray_actor_options=settings.ingress_actor_options,
        graceful_shutdown_timeout_s=settings.limits.grace,
    )
    return ingress.bind(engine.bind(settings), settings)
