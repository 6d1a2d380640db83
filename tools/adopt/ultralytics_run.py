"""Reader of the args.yaml that Ultralytics' train writes, and of data.yaml."""
