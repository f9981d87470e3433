"""Where handlers find the service in the aiohttp application."""

from aiohttp import web
from prometheus_client import CollectorRegistry

from tracker.cluster.siblings import Siblings
from tracker.hosts.drains import Drains
from tracker.preseed_service import PreseedService
from tracker.service import Service

DRAINS: web.AppKey[Drains] = web.AppKey("drains", Drains)
PRESEEDS: web.AppKey[PreseedService] = web.AppKey("preseeds", PreseedService)
SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry", CollectorRegistry)
SIBLINGS: web.AppKey[Siblings] = web.AppKey("siblings", Siblings)
"""Absent where the tracker is alone."""
