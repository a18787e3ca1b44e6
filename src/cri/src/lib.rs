//! The only interface to the container runtime.
//!
//! In:  calls of the duties; sockets on the node.
//! Out: the runtime's responses, as plain types; image references, parsed.
//!
//! Everything that the node daemon needs from a runtime is one trait, [`Runtime`], served over CRI v1 on the runtime's
//! unix socket. The duties see neither gRPC nor protobuf, and their tests can put a server of their own behind the
//! socket.

pub mod client;
mod discovery;
mod error;
#[cfg(any(test, feature = "testing"))]
pub mod panicking;
mod runtime;
mod types;

pub use discovery::{DiscoveryOptions, Runtimes, SocketHealth, no_runtime_reason};
pub use error::{Error, PullCause};
pub use runtime::Runtime;
pub use types::{
    AuthConfig, Container, ContainerDetails, ContainerState, ContainerStatus, DownloadProgress, Environment,
    ExecOutput, Image, ImagePins, PullRequest, Version,
};
