//! Reduces a NodePodProbe to the input of [`super::plan`].

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Probe;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::plan::{Handler, MAX_TIMEOUT, ProbeKey, ProbeSpec};
use crate::pods::bounded_seconds;
use kruise_api::node_pod_probe::{MAX_PROBES_OF_POD, NodePodProbeSpec};
use kruise_cluster::Key;
use kruise_ops::panics::catch_panic_sync;

/// The controller's name in logs and in liveness.
pub(super) const NAME: &str = "pod probe";

/// The probes; of several with one name in a Pod the first counts. One that panics is not probed, and shows that.
pub fn parse(spec: &NodePodProbeSpec) -> BTreeMap<ProbeKey, ProbeSpec> {
    let mut probes = BTreeMap::new();
    for pod in &spec.pod_probes {
        for (index, probe) in pod.probes.iter().enumerate() {
            let key = ProbeKey {
                pod: Key::namespaced(pod.namespace.as_str(), pod.name.as_str()),
                uid: pod.uid.clone(),
                name: probe.name.clone(),
            };
            let parsed = catch_panic_sync(NAME, format_args!("{key}: spec"), || {
                probe_spec(&probe.container_name, &probe.probe)
            });
            let mut parsed = parsed.unwrap_or_else(|panicked| ProbeSpec {
                handler: Handler::Invalid(panicked.to_string()),
                ..probe_spec(&probe.container_name, &Probe::default())
            });
            if index >= MAX_PROBES_OF_POD {
                parsed.handler = Handler::Invalid(format!(
                    "not probed: the Pod has more than {MAX_PROBES_OF_POD} probes"
                ));
            }
            probes.entry(key).or_insert(parsed);
        }
    }
    probes
}

fn probe_spec(container: &str, probe: &Probe) -> ProbeSpec {
    // As in OpenKruise, absent means 1 for all of them.
    let seconds =
        |value: Option<i32>| bounded_seconds(value.map_or(1, i64::from)).max(Duration::from_secs(1));
    let threshold = |value: Option<i32>| {
        value
            .and_then(|value| u32::try_from(value).ok())
            .unwrap_or(1)
            .max(1)
    };
    ProbeSpec {
        container: container.to_owned(),
        handler: handler(probe).unwrap_or_else(Handler::Invalid),
        initial_delay: seconds(probe.initial_delay_seconds),
        period: seconds(probe.period_seconds),
        timeout: seconds(probe.timeout_seconds).min(MAX_TIMEOUT),
        success_threshold: threshold(probe.success_threshold),
        failure_threshold: threshold(probe.failure_threshold),
    }
}

/// What is done, or why nothing can be.
fn handler(probe: &Probe) -> Result<Handler, String> {
    if let Some(exec) = &probe.exec {
        let command = exec.command.clone().unwrap_or_default();
        return match command.is_empty() {
            true => Err("exec has no command".to_owned()),
            false => Ok(Handler::Exec { command }),
        };
    }
    if let Some(get) = &probe.http_get {
        let scheme = get.scheme.as_deref().filter(|scheme| !scheme.is_empty());
        let headers = get.http_headers.iter().flatten();
        return Ok(Handler::Http {
            tls: scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case("https")),
            port: port("httpGet", &get.port)?,
            path: get.path.clone().unwrap_or_default(),
            headers: headers
                .map(|header| (header.name.clone(), header.value.clone()))
                .collect(),
        });
    }
    if let Some(tcp) = &probe.tcp_socket {
        let port = port("tcpSocket", &tcp.port)?;
        return Ok(Handler::Tcp { port });
    }
    if let Some(grpc) = &probe.grpc {
        return Ok(Handler::Grpc {
            port: port("grpc", &IntOrString::Int(grpc.port))?,
            service: grpc.service.clone().unwrap_or_default(),
        });
    }
    Err("the probe has no exec, httpGet, tcpSocket or grpc".to_owned())
}

/// A port; names are resolved before they get here.
fn port(handler: &str, port: &IntOrString) -> Result<u16, String> {
    let (number, shown) = match port {
        IntOrString::Int(number) => (u16::try_from(*number).ok(), number.to_string()),
        IntOrString::String(text) => (text.parse().ok(), format!("{text:?}")),
    };
    number
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("{handler}.port is {shown}, which is no port number"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse_probe(probe: Value) -> ProbeSpec {
        let spec = json!({ "podProbes": [{ "name": "p", "namespace": "n", "uid": "u", "IP": "",
            "probes": [{ "name": "m#a", "containerName": "c", "probe": probe }] }] });
        let spec: NodePodProbeSpec = serde_json::from_value(spec).unwrap_or_default();
        parse(&spec)
            .into_values()
            .next()
            .unwrap_or_else(|| probe_spec("", &Probe::default()))
    }

    #[test]
    fn absent_and_unusable_numbers_count_as_one_second() {
        let second = Duration::from_secs(1);
        for probe in [
            json!({}),
            json!({ "periodSeconds": 0, "timeoutSeconds": -5, "initialDelaySeconds": i32::MIN, "failureThreshold": -1 }),
        ] {
            let spec = parse_probe(probe);
            assert_eq!(
                (spec.period, spec.timeout, spec.initial_delay),
                (second, second, second)
            );
            assert_eq!((spec.success_threshold, spec.failure_threshold), (1, 1));
        }
    }

    #[test]
    fn timeout_is_bounded() {
        for (seconds, expected) in [(59, 59), (61, 60), (i32::MAX, 60)] {
            let spec = parse_probe(json!({ "timeoutSeconds": seconds }));
            assert_eq!(spec.timeout, Duration::from_secs(expected));
        }
    }

    #[test]
    fn ports_are_parsed_and_hosts_ignored() {
        let tcp =
            |port: Value| parse_probe(json!({ "tcpSocket": { "host": "10.0.0.1", "port": port } })).handler;
        assert_eq!(tcp(json!(80)), Handler::Tcp { port: 80 });
        assert_eq!(tcp(json!("81")), Handler::Tcp { port: 81 });
        for (port, shown) in [
            (json!(0), "0"),
            (json!(70_000), "70000"),
            (json!("http"), "\"http\""),
        ] {
            let why = format!("tcpSocket.port is {shown}, which is no port number");
            assert_eq!(tcp(port), Handler::Invalid(why));
        }
        let get =
            parse_probe(json!({ "httpGet": { "host": "h", "port": 1, "scheme": "HTTPS", "path": "/x" } }));
        let path = "/x".to_owned();
        let expected = Handler::Http {
            tls: true,
            port: 1,
            path,
            headers: Vec::new(),
        };
        assert_eq!(get.handler, expected);
    }

    #[test]
    fn probes_beyond_the_limit_of_a_pod_are_not_run() {
        let probe = |index: usize| json!({ "name": format!("m#{index:03}"), "containerName": "c", "probe": { "grpc": { "port": 1 } } });
        let probes: Vec<Value> = (0..MAX_PROBES_OF_POD + 2).map(probe).collect();
        let spec = json!({ "podProbes": [{ "name": "p", "namespace": "n", "uid": "u", "IP": "", "probes": probes }] });
        let spec: NodePodProbeSpec = serde_json::from_value(spec).unwrap_or_default();
        let parsed = parse(&spec);
        let invalid = parsed
            .values()
            .filter(|probe| matches!(probe.handler, Handler::Invalid(_)));
        assert_eq!((parsed.len(), invalid.count()), (MAX_PROBES_OF_POD + 2, 2));
    }
}
