//! Ends a pull whose layers cannot fit on the node: a full disk harms every Pod of the node.
//!
//! In:  bytes of the pull, the runtime's image filesystem.
//! Out: an error with the bytes that are needed and available.
//!
//! A runtime does not return free space, and the daemon's container has no directory of the node but the socket's. Its
//! own root is an overlay, though, whose upper directory the runtime has made on the image filesystem; the kernel
//! returns the free space of that one for it. What cannot be determined ends no pull.

use std::path::Path;

use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, statfs};

use kruise_api::byte_size::format_bytes;
use kruise_cri::{DownloadProgress, Error, PullCause, Runtime};

/// The directory of the snapshotter that downloads and unpacks every layer. Others fetch parts on demand, or do not
/// keep layers as files.
const EAGER_SNAPSHOTTER: &str = "io.containerd.snapshotter.v1.overlayfs";

/// Checks that the rest of a pull fits.
///
/// # Errors
/// [`PullCause::InsufficientDisk`] if it does not.
pub async fn check(runtime: &dyn Runtime, image: &str, progress: DownloadProgress) -> Result<(), Error> {
    let Ok(Some(directory)) = runtime.image_filesystem().await else {
        return Ok(());
    };
    if directory.file_name().is_none_or(|name| name != EAGER_SNAPSHOTTER) {
        return Ok(());
    }
    let Some(available) = available_bytes(&directory) else {
        return Ok(());
    };
    let required = required_bytes(progress);
    if required <= available {
        return Ok(());
    }
    let (required, available) = (format_bytes(required), format_bytes(available));
    Err(Error::Pull {
        image: image.to_owned(),
        cause: PullCause::InsufficientDisk,
        message: format!("at least {required} are needed for the image's layers, {available} are available"),
    })
}

/// The least space that the rest of a pull takes: containerd keeps each layer as it was downloaded, and unpacked.
fn required_bytes(progress: DownloadProgress) -> u64 {
    progress
        .total
        .saturating_sub(progress.downloaded)
        .saturating_mul(2)
}

/// Bytes available below this container's root, or, outside of a container, in that directory.
fn available_bytes(directory: &Path) -> Option<u64> {
    let root = statfs("/").ok()?;
    let filesystem = match root.filesystem_type() {
        OVERLAYFS_SUPER_MAGIC => root,
        _ => statfs(directory).ok()?,
    };
    let block_bytes = u64::try_from(filesystem.block_size()).ok()?;
    Some(filesystem.blocks_available().saturating_mul(block_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_byte_is_needed_twice() {
        let required = |downloaded, total| required_bytes(DownloadProgress { downloaded, total });
        assert_eq!(required(10, 30), 40);
        assert_eq!(required(30, 30), 0);
        assert_eq!(required(31, 30), 0);
        assert_eq!(required(0, u64::MAX), u64::MAX);
    }
}
