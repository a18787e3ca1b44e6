//! Limits of what is read of a Pod.

/// More containers than kubelet could run; each takes some hundred bytes.
pub(super) const MAX_CONTAINERS: usize = 500;
/// Maximum bytes of all preStop hooks of a Pod, as JSON.
pub(super) const MAX_HOOK_BYTES: usize = 64 << 10;
/// Maximum bytes of all variables that a Pod's containers take from labels and annotations: the same annotation can be
/// referenced thousands of times.
pub(super) const MAX_ENV_BYTES: usize = 256 << 10;

/// Why a Pod is rejected: its author could make it so large that the daemon
/// could not read other Pods of the node.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("it has more than {} containers", MAX_CONTAINERS)]
    TooManyContainers,
    #[error("its preStop hooks have more than {} bytes", MAX_HOOK_BYTES)]
    HooksTooLarge,
    #[error(
        "the environment that it takes from labels and annotations has more than {} bytes",
        MAX_ENV_BYTES
    )]
    EnvironmentTooLarge,
}
