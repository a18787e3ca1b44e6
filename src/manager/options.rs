//! The manager's command line; names and meanings are upstream's where upstream has them.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::Gates;
use crate::admission;
use crate::api::keys;
use crate::ops::logs::Format;
use crate::ops::upstream_flags::UpstreamFlags;

/// Options of `kruise-manager`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Kubeconfig file; the Pod's service account when absent
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Namespace of this installation: of the webhook's Service and certificate
    #[arg(long, env = "POD_NAMESPACE", default_value = keys::SYSTEM_NAMESPACE, value_name = "NAMESPACE")]
    pub namespace: String,

    /// Namespace that pull secrets are copied to for the daemons
    #[arg(
        long,
        env = keys::ENV_DAEMON_CONFIG_NAMESPACE,
        default_value = keys::DAEMON_CONFIG_NAMESPACE,
        value_name = "NAMESPACE"
    )]
    pub daemon_config_namespace: String,

    /// Name or address that the API server reaches the webhooks at directly, instead of through the Service
    #[arg(long, env = "WEBHOOK_HOST", value_name = "HOST")]
    pub webhook_host: Option<String>,

    /// Port that webhooks are served on
    #[arg(long, env = "WEBHOOK_PORT", default_value_t = admission::DEFAULT_PORT, value_name = "PORT")]
    pub webhook_port: u16,

    /// Address of /metrics: HOST:PORT, or :PORT for all interfaces
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    pub metrics_addr: String,

    /// Address of /healthz and /readyz: HOST:PORT, or :PORT for all interfaces
    #[arg(long, default_value = ":8000", value_name = "ADDRESS")]
    pub health_probe_addr: String,

    /// Run the controllers only while holding the Lease 'kruise-manager', so that several replicas can run
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

    /// How many nodes are written to at once for ImagePullJobs
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub imagepulljob_workers: usize,

    /// How many NodeImages are created and cleaned up at once
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub nodeimage_workers: usize,

    /// How many ContainerRecreateRequests are worked on at once
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub crr_workers: usize,

    /// How many Pods are written to at once for the condition KruisePodReady
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub podreadiness_workers: usize,

    /// How many CloneSets are worked on at once
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub cloneset_workers: usize,

    /// Do not count Pods of CloneSets that are held before their deletion, so that their place is taken at once
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

    /// Seconds that a pulled tag stays listed beyond its job's own limits; at most 31 days
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
        value_parser = Gates::read,
        value_name = "GATES",
        long_help = Gates::help()
    )]
    pub feature_gates: Gates,

    /// How log lines look; RUST_LOG chooses which there are
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: Format,

    /// Flags of upstream's that change nothing here.
    #[command(flatten)]
    pub upstream: UpstreamFlags,
}

/// Reads a duration as Go writes it.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration; expected for example 30s, 500ms or 1m30s");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let span: jiff::SignedDuration = text.parse().map_err(|_| wrong())?;
    Duration::try_from(span).map_err(|_| wrong())
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
    fn the_arguments_of_upstreams_deployment_are_taken() {
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
        let named: Vec<_> = options.upstream.given().map(|(flag, _)| flag).collect();
        assert_eq!(
            named,
            ["--logtostderr", "--v", "--sync-period", "--rest-config-qps"]
        );
        let off = Cli::try_parse_from(["manager", "--enable-leader-election=false"]).unwrap();
        assert!(!off.options.enable_leader_election);
    }

    #[test]
    fn durations_are_read_as_go_writes_them() {
        assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1m30s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        assert!(duration("-1s").is_err());
        assert!(duration("soon").is_err());
    }
}
