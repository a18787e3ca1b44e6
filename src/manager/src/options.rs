//! The manager's command line; flags of upstream keep their names and meanings.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::FeatureGates;
use crate::admission;
use kruise_api::keys;
use kruise_cluster::lease::{InvalidLeaseTiming, LeaseTiming};
use kruise_ops::flag_values::{duration, or, path, workers};
use kruise_ops::logs::Format;
use kruise_ops::traces::TraceOptions;
use kruise_ops::upstream_flags::UpstreamFlags;

/// Default name of the Lease; upstream's, so that only one of two managers leads, whichever project they are from.
pub const LEASE: &str = "kruise-manager";

/// Which half of the manager a process is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Both halves
    #[default]
    All,
    /// Controllers, and the webhooks' certificates and registration
    Controllers,
    /// Admission and conversion webhooks
    Webhooks,
}

/// Options of `kruise-manager`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// What to run. In a cluster, controllers and webhooks have a Deployment each
    #[arg(long, value_enum, default_value_t, value_name = "ROLE")]
    pub role: Role,

    /// Path to a kubeconfig file; the default is the first that exists of KUBECONFIG, ~/.kube/config and the Pod's service account
    #[arg(long, value_parser = path, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Namespace that this is installed in, with the webhooks' Service and certificate Secret
    #[arg(
        long,
        env = "POD_NAMESPACE",
        value_parser = or(keys::SYSTEM_NAMESPACE),
        default_value = keys::SYSTEM_NAMESPACE,
        value_name = "NAMESPACE"
    )]
    pub pod_namespace: String,

    /// Namespace that pull secrets are copied to for the daemons
    #[arg(
        long,
        env = keys::ENV_DAEMON_CONFIG_NAMESPACE,
        value_parser = or(keys::DAEMON_CONFIG_NAMESPACE),
        default_value = keys::DAEMON_CONFIG_NAMESPACE,
        value_name = "NAMESPACE"
    )]
    pub daemon_config_namespace: String,

    /// Host name or IP address at which the API server reaches the webhooks; by default it uses the Service
    #[arg(long, env = "WEBHOOK_HOST", value_name = "HOST")]
    pub webhook_host: Option<String>,

    /// Port that webhooks are served on
    #[arg(
        long,
        env = "WEBHOOK_PORT",
        value_parser = port,
        default_value_t = admission::DEFAULT_PORT,
        value_name = "PORT"
    )]
    pub webhook_port: u16,

    /// Address of /metrics: HOST:PORT, or :PORT for all interfaces; 0 disables it
    #[arg(long, value_parser = or(METRICS), default_value = METRICS, value_name = "ADDRESS")]
    pub metrics_addr: String,

    /// Address of /metrics over HTTPS, for clients whose token RBAC allows to get it: HOST:PORT, or :PORT for all interfaces; none if empty or 0
    #[arg(long, default_value = "", hide_default_value = true, value_name = "ADDRESS")]
    pub secure_metrics_addr: String,

    /// Address of /healthz and /readyz: HOST:PORT, or :PORT for all interfaces; 0 or an empty value disables it
    #[arg(long, default_value = ":8000", value_name = "ADDRESS")]
    pub health_probe_addr: String,

    /// Run the controllers only while holding a Lease, so that several replicas can run
    #[arg(
        long,
        default_value_t = true,
        action = clap::ArgAction::Set,
        num_args = 0..=1,
        default_missing_value = "true",
        require_equals = true,
        value_name = "BOOL"
    )]
    pub enable_leader_election: bool,

    /// Namespace of the Lease; that of this installation when absent
    #[arg(long, value_name = "NAMESPACE")]
    pub leader_election_namespace: Option<String>,

    /// Name of the Lease
    #[arg(long, value_parser = or(LEASE), default_value = LEASE, value_name = "NAME")]
    pub leader_election_id: String,

    /// How long other replicas wait after the last renewal before they take the Lease; whole seconds
    #[arg(long, default_value = "15s", value_parser = duration, value_name = "DURATION")]
    pub leader_election_lease_duration: Duration,

    /// How long the leader tries to renew before it gives up; at least 1 s less than the lease duration
    #[arg(long, default_value = "10s", value_parser = duration, value_name = "DURATION")]
    pub leader_election_renew_deadline: Duration,

    /// How long replicas wait between attempts; at least 100ms, and the renew deadline must be more than 1.2 times as long
    #[arg(long, default_value = "2s", value_parser = duration, value_name = "DURATION")]
    pub leader_election_retry_period: Duration,

    /// Maximum number of nodes written to in parallel for ImagePullJobs
    #[arg(long, value_parser = workers, default_value = "32", value_name = "N")]
    pub imagepulljob_workers: usize,

    /// Maximum number of nodes that pull from one registry at a time, for all ImagePullJobs together; 0 for no limit
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub max_pulls_per_registry: usize,

    /// Maximum number of NodeImages processed in parallel
    #[arg(long, value_parser = workers, default_value = "8", value_name = "N")]
    pub nodeimage_workers: usize,

    /// Maximum number of ContainerRecreateRequests processed in parallel
    #[arg(long, value_parser = workers, default_value = "16", value_name = "N")]
    pub crr_workers: usize,

    /// Maximum number of Pods processed in parallel for the condition KruisePodReady
    #[arg(long, value_parser = workers, default_value = "8", value_name = "N")]
    pub podreadiness_workers: usize,

    /// Maximum number of CloneSets processed in parallel
    #[arg(long, value_parser = workers, default_value = "16", value_name = "N")]
    pub cloneset_workers: usize,

    /// Maximum number of SidecarSets processed in parallel
    #[arg(long, value_parser = workers, default_value = "3", value_name = "N")]
    pub sidecarset_workers: usize,

    /// Maximum number of Pods, nodes and PodProbeMarkers processed in parallel for probes
    #[arg(long, value_parser = workers, default_value = "8", value_name = "N")]
    pub podprobemarker_workers: usize,

    /// Maximum number of Pods processed in parallel whose sidecars are terminated
    #[arg(long, value_parser = workers, default_value = "3", value_name = "N")]
    pub sidecarterminator_workers: usize,

    /// Do not count CloneSet Pods in state PreparingDelete, so that they are replaced at once
    #[arg(
        long,
        default_value_t = false,
        action = clap::ArgAction::Set,
        num_args = 0..=1,
        default_missing_value = "true",
        require_equals = true,
        value_name = "BOOL"
    )]
    pub cloneset_scaling_exclude_preparing_delete: bool,

    /// How long a Node must have been ready before its NodeImage is created: 30s, 500ms, 1m30s
    #[arg(long, default_value = "0s", value_parser = duration, value_name = "DURATION")]
    pub nodeimage_creation_delay: Duration,

    /// Seconds that a pulled tag stays in the NodeImage after its job's time limits; at most 31 days
    #[arg(
        long,
        default_value_t = 300,
        value_parser = clap::value_parser!(i32).range(0..=2_678_400),
        value_name = "SECONDS"
    )]
    pub default_ttlseconds_for_always_nodeimage: i32,

    /// Feature gates, as NAME=true|false separated by commas
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        value_parser = FeatureGates::parse,
        value_name = "GATES",
        long_help = FeatureGates::help()
    )]
    pub feature_gates: FeatureGates,

    /// Log format. The environment variable RUST_LOG sets the level, for example RUST_LOG=info,kruise=debug
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: Format,

    /// OpenTelemetry traces
    #[command(flatten)]
    pub traces: TraceOptions,

    /// Flags of OpenKruise's manager that have no effect here
    #[command(flatten)]
    pub upstream: UpstreamFlags,
}

impl Options {
    /// The namespace of the Lease.
    #[must_use]
    pub fn lease_namespace(&self) -> &str {
        let given = self.leader_election_namespace.as_deref();
        given
            .filter(|name| !name.is_empty())
            .unwrap_or(&self.pod_namespace)
    }

    /// Timing of the Lease.
    ///
    /// # Errors
    /// When the durations do not satisfy the rules of leader election.
    pub fn timing(&self) -> Result<LeaseTiming, InvalidLeaseTiming> {
        LeaseTiming::new(
            self.leader_election_lease_duration,
            self.leader_election_renew_deadline,
            self.leader_election_retry_period,
        )
    }
}

/// Default of `--metrics-addr`.
const METRICS: &str = "127.0.0.1:8080";

/// Parses a port; an empty value is the default.
fn port(text: &str) -> Result<u16, String> {
    match text {
        "" => Ok(admission::DEFAULT_PORT),
        _ => text.parse().map_err(|_| format!("{text:?} is not a port")),
    }
}

#[cfg(test)]
impl Default for Options {
    /// The options of an empty command line.
    fn default() -> Self {
        kruise_ops::flag_values::default_args()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn upstream_deployment_arguments_are_accepted() {
        let args = [
            "manager",
            "--enable-leader-election",
            "--metrics-addr=127.0.0.1:8080",
            "--health-probe-addr=:8000",
            "--logtostderr=true",
            "--leader-election-namespace=kruise-system",
            "--v=4",
            "--feature-gates=",
            "--sync-period=0",
            "--rest-config-qps",
            "30",
        ];
        let options = Cli::try_parse_from(args).unwrap().options;
        assert!(options.enable_leader_election);
        let ignored: Vec<_> = options.upstream.given().map(|(flag, _)| flag).collect();
        assert_eq!(ignored, ["logtostderr", "rest-config-qps", "sync-period", "v"]);
        let off = Cli::try_parse_from(["manager", "--enable-leader-election=false"]).unwrap();
        assert!(!off.options.enable_leader_election);
    }

    #[test]
    fn leader_election_durations_must_fit_into_each_other() {
        let check = |args: &[&str]| {
            let args = [&["manager"], args].concat();
            Cli::try_parse_from(args).unwrap().options.timing()
        };
        assert_eq!(check(&[]), Ok(LeaseTiming::default()));
        assert!(check(&["--leader-election-lease-duration=1m"]).is_ok());
        assert!(check(&["--leader-election-lease-duration=10s"]).is_err());
        assert!(check(&["--leader-election-renew-deadline=2s"]).is_err());
        assert!(check(&["--leader-election-retry-period=0"]).is_err());
    }
}
