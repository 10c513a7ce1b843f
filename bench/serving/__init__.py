"""Servers under load, and how fast a checkpoint becomes one: conversion and loading."""
