//! Reports when a socket may have appeared or disappeared: inotify on its directory and the one above.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::future::pending;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watched directories. Without inotify nothing is ever reported, and the regular check is enough.
pub(super) struct DirectoryWatcher {
    inotify: Option<AsyncFd<InotifyHandle>>,
    directories: BTreeSet<PathBuf>,
    names: BTreeSet<OsString>,
}

struct InotifyHandle(Inotify);

impl AsRawFd for InotifyHandle {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// The safe constructor is deprecated because a descriptor could be closed without tokio's knowledge; this one is owned
/// by the handle that tokio owns, and the replacement is unsafe.
#[allow(deprecated)]
fn new_inotify() -> std::io::Result<AsyncFd<InotifyHandle>> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
    AsyncFd::with_interest(InotifyHandle(inotify), Interest::READABLE)
}

impl DirectoryWatcher {
    /// Watches the directory of each socket and the one above it, in which it may have to be created first.
    pub(super) fn watch(sockets: &[PathBuf]) -> Self {
        let ancestor = |path: &Path, n: usize| path.ancestors().nth(n).map(Path::to_owned);
        let directories = sockets
            .iter()
            .flat_map(|s| [ancestor(s, 1), ancestor(s, 2)])
            .flatten()
            .collect();
        let names = sockets
            .iter()
            .flat_map(|s| [Some(s.clone()), ancestor(s, 1)])
            .flatten()
            .filter_map(|path| path.file_name().map(ToOwned::to_owned))
            .collect();
        let inotify = new_inotify()
            .inspect_err(|e| {
                tracing::warn!("cannot watch for new sockets, so they are checked at intervals: {e}")
            })
            .ok();
        let watcher = Self {
            inotify,
            directories,
            names,
        };
        watcher.add_watches();
        watcher
    }

    /// Returns when a file with the name of a socket, or of its directory, has been created, deleted or moved.
    pub(super) async fn changed(&mut self) {
        let Some(inotify) = &self.inotify else {
            return pending().await;
        };
        loop {
            let Ok(mut ready) = inotify.readable().await else {
                return pending().await;
            };
            let events = inotify.get_ref().0.read_events();
            match events {
                Ok(events) => {
                    let relevant = events
                        .iter()
                        .any(|e| e.name.as_ref().is_none_or(|name| self.names.contains(name)));
                    if relevant {
                        self.add_watches();
                        return;
                    }
                }
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(_) => return pending().await,
            }
        }
    }

    /// Watches every directory that exists; adding a watch twice changes nothing.
    fn add_watches(&self) {
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_ONLYDIR;
        let Some(inotify) = &self.inotify else { return };
        for directory in &self.directories {
            // A directory that does not exist yet is added when the one above reports it.
            let _not_there_yet = inotify.get_ref().0.add_watch(directory, flags);
        }
    }
}
