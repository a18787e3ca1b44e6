//! Cgroups of sandboxes.

use std::io;
use std::path::PathBuf;

use walkdir::WalkDir;

/// Cgroups that have `name` in their path, children before their parents. Others may be deleted during the walk.
pub fn cgroups_named(name: &str) -> io::Result<Vec<PathBuf>> {
    let deleted = |e: &walkdir::Error| {
        e.io_error().is_some_and(|e| {
            e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(nix::libc::ENODEV)
        })
    };
    WalkDir::new("/sys/fs/cgroup")
        .contents_first(true)
        .into_iter()
        .filter_entry(|entry| entry.file_type().is_dir())
        .filter(|entry| !entry.as_ref().is_err_and(deleted))
        .map(|entry| Ok(entry?.into_path()))
        .filter(|dir| dir.as_ref().is_ok_and(|dir| dir.to_string_lossy().contains(name)) || dir.is_err())
        .collect()
}
