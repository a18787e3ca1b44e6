//! Starts the manager, or the requested half of it: first the health server, then admission, then the controllers once
//! the Lease is held.

use std::sync::Arc;
use std::time::Duration;

use kube::Api;
use kube::api::ListParams;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    Context, FeatureGate, Options, Role, Stores, cloneset, container_recreate, container_recreate_job,
    enhanced_liveness, image_list_pull_job, image_pull_job, launch_priority, node_image, pod_probe_marker,
    pod_readiness, sidecar_terminator, sidecarset,
};
use crate::admission;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_cluster::lease::{Election, HeldLease, InvalidLeaseTiming, LeaseLost, Standby};
use kruise_cluster::{self as cluster, Cluster, Fence, ReviewedAccess};
use kruise_ops::flag_values;
use kruise_ops::http::{self, Endpoints};
use kruise_ops::metrics::{self, Program, metrics};
use kruise_ops::supervise::{self, Supervisor};
use kruise_ops::{COMMIT, Health, Progress, VERSION, logs, raise_open_file_limit, secure_metrics, traces};

/// How long reviews in flight may take at shutdown: what `terminationGracePeriodSeconds` of `deploy/manager/webhook.yaml`
/// leaves after its preStop hook. API servers wait 5 s for most reviews.
const WEBHOOKS_SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(4500);

/// Why the manager did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No cluster can be reached.
    #[error(transparent)]
    Cluster(#[from] cluster::Error),
    /// The flags of leader election contradict each other.
    #[error(transparent)]
    LeaderElection(#[from] InvalidLeaseTiming),
    /// A listener cannot be opened.
    #[error("{flag}: {source}")]
    Listen {
        /// The flag with the address.
        flag: &'static str,
        /// Cause of the failure.
        source: http::Error,
    },
    /// A task ended unexpectedly.
    #[error(transparent)]
    Ended(#[from] supervise::Error),
}

/// Runs the manager until SIGTERM or SIGINT.
///
/// # Errors
/// When it cannot start, or one of its tasks ends unexpectedly.
pub async fn run(options: Options) -> Result<(), Error> {
    metrics::init(Program::Manager);
    logs::init(options.log_format);
    raise_open_file_limit();
    tracing::info!(version = VERSION, commit = COMMIT, role = ?options.role, "kruise-manager starts");
    options.upstream.log();
    options.timing()?;
    for gate in options.feature_gates.unknown_names() {
        tracing::warn!(gate, "unknown feature gate; it has no effect");
    }
    let mut supervisor = Supervisor::default();
    if matches!(options.role, Role::Webhooks) {
        supervisor.shutdown_timeout = WEBHOOKS_SHUTDOWN_TIMEOUT;
    }
    traces::start(&mut supervisor, &options.traces, "kruise-manager", &hostname());
    let health = Health::default();
    listen(&mut supervisor, &options, &health).await?;
    let cluster = Cluster::connect(&cluster::ClientOptions {
        kubeconfig: flag_values::non_empty_path(options.kubeconfig.as_ref()),
        component: match options.role {
            Role::Webhooks => "kruise-webhook",
            Role::All | Role::Controllers => "kruise-manager",
        }
        .to_owned(),
        host: None,
    })
    .await?
    .with_watches(&health.watches);
    if !http::is_disabled(&options.secure_metrics_addr) {
        let (address, shutdown) = (&options.secure_metrics_addr, supervisor.shutdown.clone());
        let access = ReviewedAccess::new(cluster.client.clone());
        let serving = secure_metrics::serve(address, access, health.clone(), shutdown).await;
        let flag = "--secure-metrics-addr";
        let serving = serving.map_err(|source| Error::Listen { flag, source })?;
        supervisor.spawn("secure metrics", serving);
    }
    let options = Arc::new(options);
    let shutdown = supervisor.shutdown.clone();
    let (leading_tx, leading) = watch::channel(false);
    let fence = Fence::closed();
    let webhooks_only = options.role == Role::Webhooks;
    let leader_cluster = if options.enable_leader_election && !webhooks_only {
        cluster.with_fence(&fence)?
    } else {
        cluster.clone()
    };
    let webhooks = admission::Options {
        serve: options.role != Role::Controllers,
        manage: !webhooks_only,
        namespace: options.pod_namespace.clone(),
        host: options.webhook_host.clone().filter(|host| !host.is_empty()),
        port: options.webhook_port,
        gates: options.feature_gates.clone(),
    };
    supervisor.spawn(
        "admission",
        admission::run(
            cluster.clone(),
            leader_cluster.clone(),
            webhooks,
            leading,
            health.clone(),
            shutdown.clone(),
        ),
    );
    if !webhooks_only {
        supervisor.spawn(
            "controllers",
            run_elected(
                cluster,
                leader_cluster,
                fence,
                options,
                health,
                leading_tx,
                shutdown,
            ),
        );
    }
    Ok(supervisor.run().await?)
}

async fn listen(supervisor: &mut Supervisor, options: &Options, health: &Health) -> Result<(), Error> {
    let same_address = options.metrics_addr == options.health_probe_addr;
    let probes = if same_address {
        Endpoints::Both
    } else {
        Endpoints::Health
    };
    let mut serve = async |flag, address: &str, what| {
        let listener = http::listen(address)
            .await
            .map_err(|source| Error::Listen { flag, source })?;
        let shutdown = supervisor.shutdown.clone();
        supervisor.spawn("http", http::serve(listener, what, health.clone(), shutdown));
        Ok::<(), Error>(())
    };
    if !http::is_disabled(&options.health_probe_addr) {
        serve("--health-probe-addr", &options.health_probe_addr, probes).await?;
    }
    if !same_address && !http::is_disabled(&options.metrics_addr) {
        serve("--metrics-addr", &options.metrics_addr, Endpoints::Metrics).await?;
    }
    Ok(())
}

/// Runs the controllers whenever the Lease is held, until shutdown. `leader_cluster` is the cluster behind `fence`.
async fn run_elected(
    cluster: Cluster,
    leader_cluster: Cluster,
    fence: Fence,
    options: Arc<Options>,
    health: Health,
    leading_tx: watch::Sender<bool>,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    if !options.enable_leader_election {
        leading_tx.send_replace(true);
        return run_controllers(leader_cluster, options, health, shutdown).await;
    }
    let (namespace, name) = (options.lease_namespace(), options.leader_election_id.as_str());
    let election = Election::new(
        &cluster,
        namespace,
        name,
        holder_identity(),
        options.timing()?,
        fence,
    );
    let leader_gauge = metrics().leader.get_or_create_owned(&[("name", name.to_owned())]);
    loop {
        health.set_ready("leader election", "standing by");
        leader_gauge.set(0);
        let report_standby = |standby: Standby<'_>| match standby {
            Standby::Behind(leader) => {
                health.set_ready("leader election", format!("standing by; {leader} leads"));
            }
            Standby::Failed(why) => {
                let lease = format!("{namespace}/{name}");
                health.set_not_ready(
                    "leader election",
                    format!("standing by; cannot acquire Lease {lease}: {why}"),
                );
            }
        };
        let acquired = Box::pin(election.acquire(report_standby));
        let Some(held) = shutdown.run_until_cancelled(acquired).await else {
            return Ok(());
        };
        tracing::info!(lease = name, "became leader");
        health.set_ready("leader election", "leading");
        leader_gauge.set(1);
        leading_tx.send_replace(true);
        let work = Box::pin(run_controllers(
            leader_cluster.clone(),
            Arc::clone(&options),
            health.clone(),
            shutdown.clone(),
        ));
        match while_leading(&election, name, held, work, &health.progress).await {
            Ok(worked) => return worked,
            Err(lost) => tracing::error!(%lost, "lost the Lease; stopped the controllers"),
        }
        leading_tx.send_replace(false);
    }
}

/// Runs `work` while the Lease is held. If the Lease is lost, `work` is dropped at once, with all its tasks: none of
/// our controllers writes while another replica leads.
async fn while_leading<T>(
    election: &Election,
    name: &str,
    lease: HeldLease,
    work: impl Future<Output = T>,
    progress: &Progress,
) -> Result<T, LeaseLost> {
    // The Lease is released last, so that no replica starts while we still write.
    let finished = CancellationToken::new();
    let mut renewal = Box::pin(election.renew_until_shutdown(
        lease,
        finished.clone(),
        progress.begin_idle("leader election"),
    ));
    tokio::select! {
        biased;
        lost = &mut renewal => match lost {
            Err(lost) => Err(lost),
            // Only `finished` ends it this way, and that is not cancelled here.
            Ok(()) => Err(LeaseLost::Taken { name: name.to_owned(), by: String::new() }),
        },
        result = work => {
            finished.cancel();
            if let Err(lost) = renewal.await {
                tracing::warn!(%lost, "lost the Lease during shutdown");
            }
            Ok(result)
        }
    }
}

/// Runs all controllers until shutdown.
async fn run_controllers(
    cluster: Cluster,
    options: Arc<Options>,
    health: Health,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    // It waits for less time than that of the process, which leaves time to release the Lease.
    let mut supervisor = Supervisor::nested(&shutdown);
    let stores = Stores::start(&cluster, &mut supervisor);
    let ctx = Context {
        restarts: Arc::default(),
        cluster,
        stores,
        options,
        progress: health.progress.clone(),
        shutdown: supervisor.shutdown.clone(),
    };
    let gates = ctx.options.feature_gates.clone();
    if gates.enabled(FeatureGate::KruiseDaemon) {
        supervisor.spawn("nodeimage", until_shutdown(node_image::run(ctx.clone())));
        let requests = container_recreate::run(ctx.clone());
        supervisor.spawn("containerrecreaterequest", until_shutdown(requests));
        let recreate_jobs = container_recreate_job::run(ctx.clone());
        supervisor.spawn("containerrecreatejob", until_shutdown(recreate_jobs));
    }
    if gates.enabled(FeatureGate::ImagePullJobGate) {
        supervisor.spawn("imagepulljob", until_shutdown(image_pull_job::run(ctx.clone())));
        let lists = image_list_pull_job::run(ctx.clone());
        supervisor.spawn("imagelistpulljob", until_shutdown(lists));
    } else {
        let deletions = image_pull_job::release_deleted_jobs(ctx.clone());
        supervisor.spawn("imagepulljob", until_shutdown(deletions));
    }
    if gates.enabled(FeatureGate::PodProbeMarkerGate) {
        let api = Api::all(ctx.cluster.client.clone());
        let (node_pod_probes, watch) =
            ctx.cluster
                .optional_reflector(api, ListParams::default(), Some::<NodePodProbe>);
        supervisor.spawn_endless("watch of nodepodprobes", watch);
        let markers = pod_probe_marker::run(ctx.clone(), node_pod_probes.clone());
        supervisor.spawn("podprobemarker", until_shutdown(markers));
        if gates.enabled(FeatureGate::EnhancedLivenessProbe) {
            let liveness = enhanced_liveness::run(ctx.clone(), node_pod_probes);
            supervisor.spawn("enhancedliveness", until_shutdown(liveness));
        }
    }
    if gates.enabled(FeatureGate::SidecarTerminator) {
        let terminator = sidecar_terminator::run(ctx.clone());
        supervisor.spawn("sidecarterminator", until_shutdown(terminator));
    }
    supervisor.spawn("podreadiness", until_shutdown(pod_readiness::run(ctx.clone())));
    supervisor.spawn(
        "launchpriority",
        until_shutdown(launch_priority::run(ctx.clone())),
    );
    supervisor.spawn("cloneset", until_shutdown(cloneset::run(ctx.clone())));
    supervisor.spawn("sidecarset", until_shutdown(sidecarset::run(ctx.clone())));
    Ok(supervisor.run().await?)
}

/// A controller ends only at shutdown.
async fn until_shutdown(controller: impl Future<Output = ()>) -> Result<(), String> {
    controller.await;
    Ok(())
}

/// Our identity in the Lease: the Pod's or machine's name, the process ID, and the start time.
fn holder_identity() -> String {
    let start = jiff::Timestamp::now().as_nanosecond();
    format!("{}_{}_{start:x}", hostname(), std::process::id())
}

/// In a Pod, its name.
fn hostname() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    host.trim().to_owned()
}
