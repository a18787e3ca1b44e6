//! Runs preStop hooks as kubelet does.
//!
//! In:  a container, with its hook from the Pod's spec, and its grace period.
//! Out: commands in the container, HTTP requests to it, or a sleep; an event on the container if its hook fails.

pub(super) mod http;
mod read_limit;

use std::time::Duration;

use k8s_openapi::api::core::v1::{HTTPGetAction, LifecycleHandler};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::pods::{NodePod, Port, bounded_seconds};
use kruise_api::keys;
use kruise_cluster::{EventRecorder, EventType};
use kruise_cri::{self as cri, Runtime};

/// Maximum bytes of a hook's output that are read: the output is not used, and many hooks run at once.
const MAX_HOOK_OUTPUT: usize = 16 << 10;

/// How often a hook starts that was interrupted by a disconnect of the runtime: a hook that breaks the connection must
/// not keep its container forever. While the runtime is unreachable no hook starts, because its containers are listed
/// first.
pub const MAX_ATTEMPTS: u32 = 3;

/// Why a hook failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// It did not end within the container's grace period.
    #[error("it did not end within {}s, the grace period", .0.as_secs())]
    TimedOut(Duration),
    /// The command could not be run; the runtime's error may quote it.
    #[error("the container runtime could not run its command ({})", .0.category())]
    Exec(cri::Error),
    /// The command ran and failed.
    #[error("its command ended with exit code {code} and printed {printed} bytes")]
    ExitCode {
        /// Its exit code.
        code: i32,
        /// Length of its output, which may contain secrets.
        printed: usize,
    },
    /// The hook names a port that the container does not have.
    #[error("httpGet.port {port:?} is neither a port number nor the name of a port of the container")]
    Port {
        /// The port in the hook.
        port: String,
    },
    /// The hook names no host and the Pod has no address.
    #[error("httpGet names no host and the Pod has no address")]
    NoHost,
    /// The request failed.
    #[error(transparent)]
    Http(#[from] http::Error),
    /// Kubelet does not run such hooks, either.
    #[error("{0} is not a hook that can be run; use exec, httpGet or sleep")]
    Unsupported(&'static str),
}

/// The target of a hook.
struct HookTarget<'a> {
    /// The runtime of the container.
    runtime: &'a dyn Runtime,
    /// ID of the container, without scheme.
    container_id: &'a str,
    /// The Pod's UID in the runtime.
    pod_uid: &'a str,
    /// The Pod's address, if it has one.
    host: Option<String>,
    /// The container's ports.
    ports: &'a [Port],
}

/// Runs the preStop hook of a container with this ID (without scheme), if it has one, for at most its grace period. A
/// hook that fails is reported; the container is stopped anyway. Dropping the future cancels the hook; a command that an
/// exec hook has started in the container continues to run.
///
/// # Errors
/// When the runtime disconnected, so that the hook must run again.
pub async fn run_pre_stop(
    runtime: &dyn Runtime,
    events: &EventRecorder,
    pod: &NodePod,
    container: &str,
    id: &str,
    grace: Duration,
) -> Result<(), cri::Error> {
    let Some(view) = pod.container(container) else {
        return Ok(());
    };
    let Some(hook) = view.pre_stop.as_ref().filter(|_| !grace.is_zero()) else {
        return Ok(());
    };
    let target = HookTarget {
        runtime,
        container_id: id,
        pod_uid: &pod.runtime_uid,
        host: pod.ips.first().cloned(),
        ports: &view.ports,
    };
    let error = match run(hook, &target, grace).await {
        Ok(()) => {
            tracing::info!(pod = %pod.name, namespace = pod.namespace, container, "preStop hook succeeded");
            return Ok(());
        }
        Err(Error::Exec(error @ cri::Error::Unreachable { .. })) => {
            tracing::warn!(pod = %pod.name, namespace = pod.namespace, container, %error, "preStop hook interrupted");
            return Err(error);
        }
        Err(error) => error,
    };
    tracing::warn!(pod = %pod.name, namespace = pod.namespace, container, %error, "preStop hook failed");
    let note = format!("PreStop hook of container {container} failed: {error}");
    let object = pod.container_reference(container);
    let reason = keys::EVENT_FAILED_PRE_STOP_HOOK;
    events.publish(object, EventType::Warning, reason, "PreStop", note);
    Ok(())
}

/// Runs `hook` to its end, for at most `timeout`.
async fn run(hook: &LifecycleHandler, target: &HookTarget<'_>, timeout: Duration) -> Result<(), Error> {
    let handler = async {
        if let Some(exec) = &hook.exec {
            return run_exec_hook(exec.command.clone().unwrap_or_default(), target, timeout).await;
        }
        if let Some(get) = &hook.http_get {
            return run_http_hook(get, target).await;
        }
        if let Some(sleep) = &hook.sleep {
            tokio::time::sleep(bounded_seconds(sleep.seconds)).await;
            return Ok(());
        }
        Err(Error::Unsupported(if hook.tcp_socket.is_some() {
            "tcpSocket"
        } else {
            "an empty handler"
        }))
    };
    tokio::time::timeout(timeout, handler)
        .await
        .unwrap_or(Err(Error::TimedOut(timeout)))
}

async fn run_exec_hook(
    command: Vec<String>,
    target: &HookTarget<'_>,
    timeout: Duration,
) -> Result<(), Error> {
    let (runtime, container) = (target.runtime, target.container_id);
    match runtime
        .exec_sync(container, &command, timeout, MAX_HOOK_OUTPUT)
        .await
    {
        // A command that printed more than the maximum has ended; its exit code is not available.
        Ok(None) => Ok(()),
        Ok(Some(output)) if output.exit_code == 0 => Ok(()),
        Ok(Some(output)) => {
            let text = String::from_utf8_lossy(&output.stderr);
            tracing::debug!(container = target.container_id, ?command, %text, "preStop hook failed");
            Err(Error::ExitCode {
                code: output.exit_code,
                printed: output.stdout.len() + output.stderr.len(),
            })
        }
        Err(error) => {
            tracing::debug!(container = target.container_id, ?command, %error, "preStop hook failed");
            Err(Error::Exec(error))
        }
    }
}

async fn run_http_hook(get: &HTTPGetAction, target: &HookTarget<'_>) -> Result<(), Error> {
    let host = match get
        .host
        .clone()
        .filter(|host| !host.is_empty())
        .or_else(|| target.host.clone())
    {
        Some(host) => host,
        None => target
            .runtime
            .pod_ips(target.pod_uid)
            .await
            .ok()
            .and_then(|ips| ips.into_iter().next())
            .ok_or(Error::NoHost)?,
    };
    let headers = get.http_headers.iter().flatten();
    let request = http::HookRequest {
        tls: get
            .scheme
            .as_deref()
            .is_some_and(|scheme| scheme.eq_ignore_ascii_case("https")),
        host,
        port: resolve_port(&get.port, target.ports)?,
        path: get.path.clone().unwrap_or_default(),
        headers: headers
            .map(|header| (header.name.clone(), header.value.clone()))
            .collect(),
    };
    Ok(http::get(&request).await?)
}

fn resolve_port(port: &IntOrString, ports: &[Port]) -> Result<u16, Error> {
    let (number, text) = match port {
        IntOrString::Int(number) => (Some(*number), number.to_string()),
        IntOrString::String(name) => {
            let named = ports
                .iter()
                .find(|port| port.name == *name)
                .map(|port| port.number);
            (named.or_else(|| name.parse().ok()), name.clone())
        }
    };
    number
        .and_then(|number| u16::try_from(number).ok())
        .filter(|number| *number > 0)
        .ok_or(Error::Port { port: text })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn hook_port_is_resolved_by_number_or_name() {
        let ports = [Port {
            name: "http".into(),
            number: 8080,
        }];
        let resolve = |port_value: IntOrString| resolve_port(&port_value, &ports).ok();
        assert_eq!(resolve(IntOrString::Int(81)), Some(81));
        assert_eq!(resolve(IntOrString::String("http".into())), Some(8080));
        assert_eq!(resolve(IntOrString::String("82".into())), Some(82));
        for wrong in [
            IntOrString::Int(0),
            IntOrString::Int(70_000),
            IntOrString::String("grpc".into()),
        ] {
            assert_eq!(resolve(wrong), None);
        }
    }

    /// More users can read events and logs than can read the Pod's secrets.
    #[test]
    fn hook_error_quotes_neither_command_nor_output() {
        let refused = cri::Error::Rejected {
            socket: "/s".into(),
            method: "ExecSync",
            code: tonic::Code::Unknown,
            message: "exec \"curl -H secret\": not found".to_owned(),
        };
        assert_eq!(
            Error::Exec(refused).to_string(),
            "the container runtime could not run its command (refused)"
        );
    }
}
