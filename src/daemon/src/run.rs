//! Starts the daemon: health first, then the cluster, the runtimes and the controllers.

use std::sync::Arc;

use super::live::RuntimeStatus;
use super::{
    Context, LiveState, Options, container_meta, control, fence, image_pull, pod_probe, pods, recreate,
};
use kruise_cluster::{self as cluster, Cluster, ReviewedAccess};
use kruise_cri::{DiscoveryOptions as Discovery, Runtimes, SocketHealth, no_runtime_reason};
use kruise_ops::http::{self, Endpoints};
use kruise_ops::metrics::{self, Program};
use kruise_ops::supervise::{self, Supervisor};
use kruise_ops::{
    COMMIT, FeatureGate, Health, VERSION, flag_values, logs, raise_open_file_limit, secure_metrics, traces,
};

/// Why the daemon did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The node's name is missing.
    #[error("the node's name is not known: set NODE_NAME (in a Pod: fieldRef spec.nodeName) or --node-name")]
    MissingNodeName,
    /// The cluster cannot be reached.
    #[error(transparent)]
    Cluster(#[from] cluster::Error),
    /// A listener cannot be opened.
    #[error("{flag}: {source}")]
    Listen {
        /// The flag with its address.
        flag: &'static str,
        /// Why not.
        source: http::Error,
    },
    /// A task ended unexpectedly.
    #[error(transparent)]
    TaskEnded(#[from] supervise::Error),
}

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// When it cannot start, or one of its tasks ends unexpectedly.
pub async fn run(options: Options) -> Result<(), Error> {
    metrics::init(Program::Daemon);
    logs::init(options.log_format);
    raise_open_file_limit();
    let node_name = options
        .node_name
        .clone()
        .filter(|n| !n.is_empty())
        .ok_or(Error::MissingNodeName)?;
    tracing::info!(
        version = VERSION,
        commit = COMMIT,
        node = node_name,
        "kruise-daemon starts"
    );
    options.log_differences();
    for gate in options.feature_gates.unknown_names() {
        tracing::warn!(gate, "unknown feature gate; it has no effect");
    }
    let mut supervisor = Supervisor::default();
    let shutdown = supervisor.shutdown.clone();
    traces::start(&mut supervisor, &options.traces, "kruise-daemon", &node_name);
    let health = Health::default();
    let listen_error = |flag| move |source| Error::Listen { flag, source };
    let listener = http::listen(&options.addr).await;
    let listener = listener.map_err(listen_error("--addr"))?;
    supervisor.spawn(
        "http",
        http::serve(listener, Endpoints::Both, health.clone(), shutdown.clone()),
    );
    let ctx = Context {
        cluster: Cluster::connect(&cluster::ClientOptions {
            kubeconfig: flag_values::non_empty_path(options.kubeconfig.as_ref()),
            component: "kruise-daemon".to_owned(),
            host: Some(node_name.clone()),
        })
        .await?
        .with_watches(&health.watches),
        runtimes: Runtimes::new(&Discovery::new(flag_values::non_empty_path(
            options.socket_file.as_ref(),
        ))),
        stop_slots: Arc::default(),
        node_name,
        live: LiveState::default(),
        health,
        options: Arc::new(options),
        shutdown,
    };
    let address = &ctx.options.secure_metrics_addr;
    if !http::is_disabled(address) {
        let access = ReviewedAccess::new(ctx.cluster.client.clone());
        let serving = secure_metrics::serve(address, access, ctx.health.clone(), ctx.shutdown.clone()).await;
        let serving = serving.map_err(listen_error("--secure-metrics-addr"))?;
        supervisor.spawn("secure metrics", serving);
    }
    start(&mut supervisor, &ctx);
    Ok(supervisor.run().await?)
}

/// Starts all tasks that live as long as the process.
fn start(supervisor: &mut Supervisor, ctx: &Context) {
    let c = ctx.clone();
    supervisor.spawn("runtimes", async move {
        c.runtimes.run(c.shutdown.clone(), &c.health.progress).await;
        Ok::<_, String>(())
    });
    supervisor.spawn_endless("fence", fence::run(ctx.clone()));
    supervisor.spawn_endless("runtime health", report_runtime_health(ctx.clone()));
    supervisor.spawn("image pull", image_pull::run(ctx.clone()));
    let (pods, watch) = pods::watch(&ctx.cluster, &ctx.node_name, ctx.runtimes.clone());
    supervisor.spawn_endless("pods", watch);
    if ctx.options.feature_gates.enabled(FeatureGate::DaemonWatchingPod) {
        supervisor.spawn("container meta", container_meta::run(ctx.clone(), pods.clone()));
    }
    if ctx.options.feature_gates.enabled(FeatureGate::PodProbeMarkerGate) {
        let probes = pod_probe::run(ctx.clone(), pods.clone());
        supervisor.spawn("pod probe", async move {
            probes.await;
            Ok::<_, String>(())
        });
    }
    supervisor.spawn("recreate", recreate::run(ctx.clone(), pods));
    let c = ctx.clone();
    supervisor.spawn("control", async move {
        control::run(&c.options.control_socket, c.live.clone(), c.shutdown.clone()).await
    });
}

/// Publishes the runtimes' state to health and the control API.
async fn report_runtime_health(ctx: Context) {
    let mut changes = ctx.runtimes.subscribe();
    loop {
        let sockets = ctx.runtimes.health();
        match sockets.iter().find(|s| s.healthy) {
            Some(socket) => ctx.health.set_ready("container runtime", &socket.message),
            None => {
                let reason = format!("none answers: {}", no_runtime_reason(&sockets));
                ctx.health.set_not_ready("container runtime", reason);
            }
        }
        ctx.live.runtimes.send_replace(runtime_views(sockets));
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// The runtimes for the control API: existing sockets; all checked paths only if no runtime answers.
fn runtime_views(sockets: Vec<SocketHealth>) -> Vec<RuntimeStatus> {
    let any_healthy = sockets.iter().any(|s| s.healthy);
    let shown = sockets.into_iter().filter(|s| !any_healthy || s.was_found());
    shown.map(runtime_view).collect()
}

fn runtime_view(socket: SocketHealth) -> RuntimeStatus {
    let message = match (socket.healthy, socket.was_found()) {
        (true, _) => String::new(),
        (false, true) => socket.message,
        (false, false) => "there is no socket".to_owned(),
    };
    let (name, version) = socket
        .version
        .map(|v| (v.runtime_name, v.runtime_version))
        .unwrap_or_default();
    RuntimeStatus {
        name,
        version,
        socket: socket.socket.display().to_string(),
        healthy: socket.healthy,
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kruise_cri::Version;

    fn socket(path: &str, healthy: bool) -> SocketHealth {
        SocketHealth {
            socket: path.into(),
            version: healthy.then(Version::default),
            checked: true,
            present: healthy,
            healthy,
            message: format!("words of {path}"),
        }
    }

    #[test]
    fn missing_sockets_are_shown_only_where_no_runtime_answers() {
        let rows = |sockets| -> Vec<_> {
            let rows = runtime_views(sockets);
            rows.into_iter().map(|r| (r.socket, r.message)).collect()
        };
        let row = |path: &str, message: &str| (path.to_owned(), message.to_owned());
        assert_eq!(
            rows(vec![socket("/a", false), socket("/b", true)]),
            [row("/b", "")]
        );
        assert_eq!(
            rows(vec![socket("/a", false), socket("/b", false)]),
            [row("/a", "there is no socket"), row("/b", "there is no socket")]
        );
    }
}
