//! Flags of upstream's manager that have no meaning here, taken so that its Deployment's arguments start ours.

use clap::Args;

/// Flags that change nothing; each that is given is named in the log.
#[derive(Args, Clone, Debug, Default)]
pub struct Ignored {
    #[arg(long, hide = true, num_args = 0..=1, default_missing_value = "true")]
    logtostderr: Option<String>,
    #[arg(long = "v", short = 'v', hide = true)]
    v: Option<String>,
    #[arg(long, hide = true)]
    sync_period: Option<String>,
    #[arg(long, hide = true, allow_hyphen_values = true)]
    rest_config_qps: Option<String>,
    #[arg(long, hide = true, allow_hyphen_values = true)]
    rest_config_burst: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, default_missing_value = "true")]
    allow_privileged: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, default_missing_value = "true")]
    enable_pprof: Option<String>,
    #[arg(long, hide = true)]
    pprof_addr: Option<String>,
    #[arg(long, hide = true)]
    expectation_timeout: Option<String>,
}

impl Ignored {
    /// The flags that were given, with the reason why they mean nothing.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let logs = "RUST_LOG and --log-format say what is logged";
        let pace = "the API server sets the pace";
        let all = [
            (&self.logtostderr, "--logtostderr", logs),
            (&self.v, "--v", logs),
            (
                &self.sync_period,
                "--sync-period",
                "nothing is synchronised by time",
            ),
            (&self.rest_config_qps, "--rest-config-qps", pace),
            (&self.rest_config_burst, "--rest-config-burst", pace),
            (
                &self.allow_privileged,
                "--allow-privileged",
                "nothing asks for it",
            ),
            (&self.enable_pprof, "--enable-pprof", "there is no profiler"),
            (&self.pprof_addr, "--pprof-addr", "there is no profiler"),
            (
                &self.expectation_timeout,
                "--expectation-timeout",
                "no wait is longer than 30 s",
            ),
        ];
        all.into_iter()
            .filter(|(value, ..)| value.is_some())
            .map(|(_, flag, why)| (flag, why))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;

    use crate::manager::Options;

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
        let named: Vec<_> = options.ignored.given().map(|(flag, _)| flag).collect();
        assert_eq!(
            named,
            ["--logtostderr", "--v", "--sync-period", "--rest-config-qps"]
        );
        let off = Cli::try_parse_from(["manager", "--enable-leader-election=false"]).unwrap();
        assert!(!off.options.enable_leader_election);
    }
}
