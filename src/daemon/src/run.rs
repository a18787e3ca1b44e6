//! Starts the daemon: health first, then the cluster, the runtimes and the duties.

use std::sync::Arc;

use super::live::Runtime;
use super::{Context, Live, Options, container_meta, control, fence, image_pull, pods, recreate};
use kruise_cluster::{self as cluster, Cluster};
use kruise_cri::{Options as Discovery, Runtimes, SocketHealth, why_none};
use kruise_ops::http::{self, Serve};
use kruise_ops::metrics::{self, Program};
use kruise_ops::supervise::{self, Supervisor};
use kruise_ops::{COMMIT, Gate, Health, VERSION, logs, raise_open_files, values};

/// Why the daemon did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not know which node it is on.
    #[error("the node's name is not known: set NODE_NAME (in a Pod: fieldRef spec.nodeName) or --node-name")]
    NodeName,
    /// There is no way to reach a cluster.
    #[error(transparent)]
    Cluster(#[from] cluster::Error),
    /// The listener for probes cannot be opened.
    #[error("--addr: {0}")]
    Listen(#[from] http::Error),
    /// A task ended that should not.
    #[error(transparent)]
    Ended(#[from] supervise::Error),
}

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// When it cannot start, or a task of it ends by itself.
pub async fn run(options: Options) -> Result<(), Error> {
    metrics::start(Program::Daemon);
    logs::init(options.log_format);
    raise_open_files();
    let node_name = options
        .node_name
        .clone()
        .filter(|n| !n.is_empty())
        .ok_or(Error::NodeName)?;
    tracing::info!(
        version = VERSION,
        commit = COMMIT,
        node = node_name,
        "kruise-daemon starts"
    );
    options.log_differences();
    for gate in options.feature_gates.unknown() {
        tracing::warn!(gate, "unknown feature gate; it has no effect");
    }
    let mut supervisor = Supervisor::default();
    let shutdown = supervisor.shutdown.clone();
    let health = Health::default();
    let listener = http::listen(&options.addr).await?;
    supervisor.spawn(
        "http",
        http::serve(listener, Serve::Both, health.clone(), shutdown.clone()),
    );
    let ctx = Context {
        cluster: Cluster::connect(&cluster::Options {
            kubeconfig: values::given(options.kubeconfig.as_ref()),
            component: "kruise-daemon".to_owned(),
            host: Some(node_name.clone()),
        })
        .await?
        .reporting_to(&health.watches),
        runtimes: Runtimes::new(&Discovery::new(values::given(options.socket_file.as_ref()))),
        stops: Arc::default(),
        node_name,
        live: Live::default(),
        health,
        options: Arc::new(options),
        shutdown,
    };
    start(&mut supervisor, &ctx);
    Ok(supervisor.run().await?)
}

/// Starts everything that lives as long as the process.
fn start(supervisor: &mut Supervisor, ctx: &Context) {
    let c = ctx.clone();
    supervisor.spawn("runtimes", async move {
        c.runtimes.run(c.shutdown.clone(), &c.health.progress).await;
        Ok::<_, String>(())
    });
    supervisor.spawn_endless("fence", fence::run(ctx.clone()));
    supervisor.spawn_endless("runtime health", tell_runtimes(ctx.clone()));
    supervisor.spawn("image pull", image_pull::run(ctx.clone()));
    let (pods, watch) = pods::watch(&ctx.cluster, &ctx.node_name);
    supervisor.spawn_endless("pods", watch);
    if ctx.options.feature_gates.on(Gate::DaemonWatchingPod) {
        supervisor.spawn("container meta", container_meta::run(ctx.clone(), pods.clone()));
    }
    supervisor.spawn("recreate", recreate::run(ctx.clone(), pods));
    let c = ctx.clone();
    supervisor.spawn("control", async move {
        control::run(&c.options.control_socket, c.live.clone(), c.shutdown.clone()).await
    });
}

/// Keeps health and the control API up to date with what is known of the runtimes.
async fn tell_runtimes(ctx: Context) {
    let mut changes = ctx.runtimes.subscribe();
    loop {
        let sockets = ctx.runtimes.health();
        match sockets.iter().find(|s| s.healthy) {
            Some(socket) => ctx.health.ready("container runtime", &socket.words),
            None => {
                let why = format!("none answers: {}", why_none(&sockets));
                ctx.health.unready("container runtime", why);
            }
        }
        ctx.live.runtimes.send_replace(views(sockets));
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// What the control API shows: the sockets that are there; all places that were looked at only where none answers.
fn views(sockets: Vec<SocketHealth>) -> Vec<Runtime> {
    let answers = sockets.iter().any(|s| s.healthy);
    let shown = sockets.into_iter().filter(|s| !answers || s.found());
    shown.map(view).collect()
}

fn view(socket: SocketHealth) -> Runtime {
    let message = match (socket.healthy, socket.found()) {
        (true, _) => String::new(),
        (false, true) => socket.words,
        (false, false) => "there is no socket".to_owned(),
    };
    let (name, version) = socket
        .version
        .map(|v| (v.runtime_name, v.runtime_version))
        .unwrap_or_default();
    Runtime {
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
            present: healthy,
            healthy,
            words: format!("words of {path}"),
        }
    }

    #[test]
    fn missing_sockets_are_shown_only_where_no_runtime_answers() {
        let rows = |sockets| -> Vec<_> {
            let views = views(sockets);
            views.into_iter().map(|r| (r.socket, r.message)).collect()
        };
        let row = |path: &str, words: &str| (path.to_owned(), words.to_owned());
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
