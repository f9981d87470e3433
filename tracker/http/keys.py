"""Where handlers find the service in the aiohttp application."""

from aiohttp import web
from prometheus_client import CollectorRegistry

from tracker.preseed_service import Preseeding
from tracker.service import Service

PRESEEDING: web.AppKey[Preseeding] = web.AppKey("preseeding", Preseeding)
SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry", CollectorRegistry)
