//! The node control API: a read-only gRPC service on a unix socket that only root may open.
//!
//! In:  [`LiveState`], which the controllers keep up to date.
//! Out: `kruise.node.v1.NodeControl`, each list once or as a stream of its changes.
//! It serves no secret and changes nothing.

mod render;
mod server;
pub mod status;
mod to_proto;
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;

use super::live::LiveState;

/// Default path of the socket.
pub const DEFAULT_SOCKET: &str = "/run/kruise/control.sock";

/// Why the service cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket cannot be created.
    #[error("control socket {path}: {source}")]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The server failed.
    #[error("control service: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// Serves `live` on `path` until shutdown, then removes the socket.
///
/// # Errors
/// When the socket cannot be created, or the server fails.
pub async fn run(path: &Path, live: LiveState, shutdown: CancellationToken) -> Result<(), Error> {
    let listener = bind_private(path).map_err(|source| Error::Socket {
        path: path.to_owned(),
        source,
    })?;
    let service =
        v1::node_control_server::NodeControlServer::new(server::ControlService::new(live, shutdown.clone()));
    let result = tonic::transport::Server::builder()
        .add_service(service)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown.cancelled_owned())
        .await;
    let _ = std::fs::remove_file(path); // the next start would remove it too
    Ok(result?)
}

/// Creates the socket under a private name with mode 0600 and then renames it, so that at no moment anyone but root can
/// open it. Replaces the socket of a previous process.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let temp_path = path.with_extension(format!("{}", std::process::id()));
    let _ = std::fs::remove_file(&temp_path);
    let listener = UnixListener::bind(&temp_path)?;
    std::fs::set_permissions(&temp_path, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&temp_path, path)?;
    Ok(listener)
}

#[cfg(test)]
mod tests;
