//! Ports of a Pod that have names.

use k8s_openapi::api::core::v1::Probe;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use super::raw_pod::items;

/// A port with a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedPort {
    /// Name of the container.
    pub container: Box<str>,
    /// Name of the port.
    pub name: Box<str>,
    /// Its number.
    pub number: u16,
}

pub(super) fn named_ports(spec: &Value) -> Box<[NamedPort]> {
    let of_container = |container: &Value| -> Vec<NamedPort> {
        let ports = items(&container["ports"]).filter_map(|port| {
            Some(NamedPort {
                container: container["name"].as_str()?.into(),
                name: port["name"].as_str().filter(|name| !name.is_empty())?.into(),
                number: port["containerPort"].as_u64()?.try_into().ok()?,
            })
        });
        ports.collect()
    };
    items(&spec["containers"]).flat_map(of_container).collect()
}

/// The probe of a container with the number of its port; `None` if no port of the container has that name.
#[must_use]
pub fn with_port_number(mut probe: Probe, container: &str, ports: &[NamedPort]) -> Option<Probe> {
    let http = probe.http_get.as_mut().map(|get| &mut get.port);
    let tcp = probe.tcp_socket.as_mut().map(|tcp| &mut tcp.port);
    for port in [http, tcp].into_iter().flatten() {
        let IntOrString::String(name) = port else { continue };
        let mut own = ports.iter().filter(|port| *port.container == *container);
        let named = own.find(|port| *port.name == **name);
        let number = named
            .map(|port| i32::from(port.number))
            .or_else(|| name.parse().ok())?;
        *port = IntOrString::Int(number);
    }
    Some(probe)
}
