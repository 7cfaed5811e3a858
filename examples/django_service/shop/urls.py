"""The URLs of the views."""

from __future__ import annotations

from django.urls import path

from shop import dashboard, views

urlpatterns = [
    path("orders", views.create),
    path("orders/<int:number>", views.show),
    path("exports", views.create_export),
    path("exports/<job_id>", views.show_export),
    path("jobs", dashboard.index, name="jobs"),
    path("jobs/<queue>/<job_id>/cancel", dashboard.cancel, name="cancel"),
    path("schedules/<name>/run", dashboard.run, name="run"),
]
