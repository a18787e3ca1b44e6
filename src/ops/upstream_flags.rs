//! Flags of upstream's programs that have no meaning here, taken so that the arguments of its manifests start ours.

use clap::Args;

/// Flags that change nothing; each that is given is named in the log.
#[derive(Args, Clone, Debug, Default)]
pub struct UpstreamFlags {
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
    #[arg(long, hide = true, allow_hyphen_values = true)]
    rate_limiter_base_delay: Option<String>,
    #[arg(long, hide = true, allow_hyphen_values = true)]
    rate_limiter_max_delay: Option<String>,
    #[arg(long, hide = true, allow_hyphen_values = true)]
    rate_limiter_qps: Option<String>,
    #[arg(long, hide = true, allow_hyphen_values = true)]
    rate_limiter_bucket_size: Option<String>,
}

impl UpstreamFlags {
    /// The flags that were given, with the reason why they mean nothing.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let logs = "RUST_LOG and --log-format say what is logged";
        let pace = "the API server sets the pace";
        let retries = "what fails is tried again after 0.5 s, and then ever later, up to 30 s";
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
            (
                &self.rate_limiter_base_delay,
                "--rate-limiter-base-delay",
                retries,
            ),
            (&self.rate_limiter_max_delay, "--rate-limiter-max-delay", retries),
            (&self.rate_limiter_qps, "--rate-limiter-qps", retries),
            (
                &self.rate_limiter_bucket_size,
                "--rate-limiter-bucket-size",
                retries,
            ),
        ];
        all.into_iter()
            .filter(|(value, ..)| value.is_some())
            .map(|(_, flag, why)| (flag, why))
    }

    /// Says in the log which of the given flags change nothing, and why.
    pub fn tell(&self) {
        for (flag, why) in self.given() {
            tracing::info!(flag, why, "this flag changes nothing");
        }
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
        upstream: UpstreamFlags,
    }

    #[test]
    fn the_arguments_of_upstreams_daemon_set_are_taken() {
        let args = [
            "x",
            "--logtostderr=true",
            "--v=5",
            "--enable-pprof=false",
            "--rest-config-burst",
            "-1",
            "--rate-limiter-base-delay=5ms",
            "--rate-limiter-qps",
            "10",
        ];
        let cli = Cli::try_parse_from(args).unwrap();
        let named: Vec<_> = cli.upstream.given().map(|(flag, _)| flag).collect();
        assert_eq!(
            named,
            [
                "--logtostderr",
                "--v",
                "--rest-config-burst",
                "--enable-pprof",
                "--rate-limiter-base-delay",
                "--rate-limiter-qps"
            ]
        );
    }
}
