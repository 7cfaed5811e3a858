"""The URLs of the views."""

from __future__ import annotations

from django.urls import path

from shop import views

urlpatterns = [path("orders", views.create), path("orders/<int:number>", views.show)]
