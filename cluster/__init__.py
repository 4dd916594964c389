"""The Serve application: config, directory, routing, autoscaling, gateway, launch."""
