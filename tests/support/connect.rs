//! A connection to a bed's API server, with the credentials of a kubeconfig.

use std::path::Path;

use kruise_cluster::{ClientOptions, Cluster};

pub async fn connect(kubeconfig: &Path) -> Cluster {
    let options = ClientOptions {
        kubeconfig: Some(kubeconfig.to_owned()),
        component: "test".into(),
        host: None,
    };
    Cluster::connect(&options).await.unwrap()
}
