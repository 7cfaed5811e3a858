"""The code that backends share: files, inotify, segment logs, and steps of `browse`, `find` and `wait`."""
