"""What backends share: files, inotify, network, logs of segments, and the steps of `browse`, `find` and `wait` that are alike."""
